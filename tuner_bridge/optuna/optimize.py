"""``optimize``: a sweep with elastic trials, called like ``study.optimize``."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import shutil
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import optuna
from optuna.trial import FrozenTrial

from dist_core.older_python import add_note
from scheduler.client.connection import SchedulerClient
from scheduler.errors import SchedulerError
from scheduler.host.embedded import EmbeddedScheduler
from scheduler.state_folder import StateFolder
from trials.errors import StateFolderInUse, StoreUnavailable
from trials.terms import StudyTerms
from tuner_bridge.driving.left_behind import left_behind
from tuner_bridge.driving.sent_environ import Asked, asked_environ, library_settings, sent_environ, withheld
from tuner_bridge.driving.study_driver import file_name
from tuner_bridge.driving.template import TrialTemplate
from tuner_bridge.errors import InvalidSweep, SweepInterrupted
from tuner_bridge.in_replica.scripts import Script
from tuner_bridge.optuna.display import in_notebook, page_link, show_page, showing_output
from tuner_bridge.optuna.objective_template import bounded, template_of
from tuner_bridge.optuna.population import Population
from tuner_bridge.optuna.population_sweep import PopulationSweep
from tuner_bridge.optuna.stages import declared_stages
from tuner_bridge.optuna.trainers import TrainerSearch
from tuner_bridge.optuna.trial_driver import OptunaDriver
from tuner_bridge.plain_endings import INTERRUPTED, end_plainly
from tuner_bridge.trackers.base import Tracker

logger = logging.getLogger(__name__)

ADOPTION_SECONDS = 25.0
"""A driver that was killed keeps its study for the length of its lease; a resumed sweep waits for that."""

Callback = Callable[[optuna.Study, FrozenTrial], None]


def optimize(
    study: optuna.Study,
    objective: Callable[[Any], Any] | Script | TrainerSearch,
    n_trials: int | None = None,
    timeout: float | None = None,
    n_jobs: int = 1,
    catch: Iterable[type[Exception]] | type[Exception] = (),
    callbacks: Iterable[Callback] | None = None,
    gc_after_trial: bool = False,
    show_progress_bar: bool = False,
    *,
    min_replicas: int = 1,
    max_replicas: int | None = None,
    slots_per_replica: int | Sequence[int] = 1,
    slots: int | None = None,
    emulate: str | None = None,
    memory_per_slot: float | None = None,
    gpus_per_slot: int | None = None,
    state_dir: str | os.PathLike[str] | None = None,
    terms: StudyTerms | None = None,
    promise_metric: tuple[str, str] | None = None,
    environ: Asked = None,
    fresh_processes: bool = False,
    resume: bool = False,
    live: bool | Literal["page"] = False,
    timeline: str | os.PathLike[str] | None = None,
    trackers: Sequence[Tracker] = (),
    show_output: bool = False,
    population: Population | None = None,
    keep_states: bool = False,
) -> None:
    """Run ``study.optimize`` with each trial an elastic job of ``min_replicas`` to ``max_replicas`` processes.

    The arguments up to ``show_progress_bar`` are ``study.optimize``'s own and mean the same.

    Args:
        study: any Optuna study; its sampler, pruner and storage are used as they are.
        objective: any callable that cloudpickle can pickle, ``tuner_bridge.script("train.py ...")``, or a
            ``TrainerSearch``. It runs on every replica of its trial.
        n_trials: trials to run; None: until ``timeout`` or ``study.stop()``.
        timeout: seconds after which no new trial begins.
        n_jobs: trials that run at a time (-1: as many as the slots allow).
        catch: exceptions that fail their trial and not the sweep.
        callbacks: called in this process with the study and each finished trial.
        gc_after_trial: collect garbage in this process after each trial.
        show_progress_bar: show Optuna's progress bar.
        min_replicas: at least this many replicas a trial.
        max_replicas: at most this many replicas a trial; default: all slots.
        slots_per_replica: slots that each replica takes, a process on each: for models that are larger than a slot.
            Several, such as ``(1, 2, 4)``: the scheduler chooses for each trial, by memory and speed.
        slots: room on this machine for the embedded scheduler; default: its GPUs, else its CPU cores. A scheduler
            named by ELASTUNE_URL has slots of its own.
        emulate: devices that the slots stand for, such as ``4x8:resnet50-imagenet@10`` (nodes x slots, whose steps take
            as long as that speed profile says, ten times as fast); with ``slots`` the profile only. Replicas are real
            processes of this machine all the same.
        memory_per_slot: GiB of this machine's memory that a replica's process may use.
        gpus_per_slot: GPUs that each process has, where the objective itself spreads its model over several.
        state_dir: where the embedded scheduler keeps logs, checkpoints and its database; default
            ``.elastune/<study>``.
        terms: the study's weight, priority and quota among others, and what its slots are to achieve; `elastune set`
            changes them while it runs.
        promise_metric: of the metrics given to ``tuner_bridge.report_metrics``, the one by which a study of several
            objectives is judged while its trials run, with its direction: ``("accuracy", "maximize")``.
        environ: variables for the trials' processes: names of this process's own, or names with values. On this
            machine trials have this process's environment anyway. A scheduler that ELASTUNE_URL names starts them
            with its machine's, and with the settings of well-known tools (``WANDB_``, ``HF_``, ``TORCH_`` and the
            like) that are set here, except for keys, tokens and passwords, which have to be named.
        fresh_processes: start each replica as a process of its own. Else one whose objective has not imported torch
            goes on with a further trial of the study, as with plain Optuna, if it has left nothing behind: no thread,
            no process, no growing memory, no failure.
        resume: go on with a sweep whose driver died: trials it left running continue from their checkpoints, and
            ``n_trials`` counts what is finished already. Needs a study in a persistent storage.
        live: show the sweep while it runs: in the terminal, with a link to its page, or in a notebook as the page
            itself; ``"page"``: print the link alone.
        timeline: base name of a picture of who held which slots when, written as .png at the end.
        trackers: of ``tuner_bridge.trackers``: each has one run a trial, with its parameters, reports, resizes and
            goodput.
        show_output: print what trials print, each line with its trial; their logs have that as well (`elastune logs`).
        population: train a population (``Population(size=16, every="4 epochs")``), whose worst members go on from the
            best. Its members run until they end; ``n_trials`` and ``n_jobs`` are not given.
        keep_states: keep the state that each trial ends with, so that others can begin with it (``enqueue_from``).
            Takes a checkpoint's room on disk for each trial.

    Raises:
        InvalidSweep: for what cannot be run.
        SchedulerError: when ELASTUNE_URL does not lead to a scheduler.
        Exception: otherwise what ``study.optimize`` raises.
    """
    end_plainly()
    _check_amounts(n_trials, timeout, n_jobs)
    template = template_of(
        objective,
        min_replicas,
        max_replicas,
        promise_metric,
        fresh_processes,
        slots_per_replica=slots_per_replica,
        study=study,
    )
    callbacks = None if callbacks is None else list(callbacks)
    _say_what_stays_behind(objective, callbacks or ())
    settings = library_settings(environ)
    own = OwnSlots(slots=slots, emulate=emulate, memory_per_slot=memory_per_slot, gpus_per_slot=gpus_per_slot)
    if n_jobs != -1 and n_jobs < 1:
        raise InvalidSweep(f"n_jobs is {n_jobs}; it must be at least 1, or -1 for as many as the slots allow")
    if population is not None:
        _check_population(study, n_trials, n_jobs)
        if declared_stages(objective):
            raise InvalidSweep("stages cannot be combined with population=: its members share no epochs; leave one out")
    if resume and isinstance(study._storage, optuna.storages.InMemoryStorage):
        raise InvalidSweep(
            "resume=True needs a study that outlives its process, but this one is in memory; create it with "
            "storage='sqlite:///sweep.db' (or any other storage) and load_if_exists=True"
        )
    leaves_nothing = isinstance(study._storage, optuna.storages.InMemoryStorage) and not keep_states
    with scheduler_for(
        study.study_name, own, state_dir, preload=template.preload, settings=settings, leaves_nothing=leaves_nothing
    ) as found:
        client, embedded = found
        driver = driver_of(study, template, client, embedded, promise_metric, trackers)
        driver.attach(None if terms is None else terms.to_json(), patience_seconds=ADOPTION_SECONDS if resume else 0.0)
        try:
            driver.say_if_emulated()
            shared = embedded is None
            sent = sent_environ(environ) if shared else asked_environ(environ)
            if shared:
                driver.say_what_differs(withheld(environ))
            driver.template = replace(bounded(template, driver.slots, max_replicas), environ=sent)
            remaining = None if population is not None else _remaining(study, n_trials, driver, resume=resume)
            if remaining == 0 and n_trials != 0:
                logger.warning("study %r already has its %d trials; nothing to do", study.study_name, n_trials)
                return
            jobs = max(1, driver.slots // (min_replicas * driver.template.replica_sizes[0])) if n_jobs == -1 else n_jobs
            driver.at_a_time, driver.left = jobs, remaining
            driver.keeps_states = keep_states or population is not None
            driver.share_stages(declared_stages(objective))
            if population is not None:
                driver.at_a_time, driver.left = population.size, None
            shown = showing_output(lambda: driver.client, driver.study_key) if show_output else contextlib.nullcontext()
            with _marked_asks(study, driver), _interruptible(driver), _display(driver, n_trials, live=live), shown:
                if population is not None:
                    PopulationSweep(
                        driver,
                        population,
                        catch=tuple(catch) if isinstance(catch, Iterable) else (catch,),
                        callbacks=callbacks or (),
                        timeout=timeout,
                        resume=resume,
                    ).run()
                    return
                study.optimize(
                    driver.run,
                    n_trials=remaining,
                    timeout=timeout,
                    n_jobs=jobs,
                    catch=catch,
                    callbacks=callbacks,
                    gc_after_trial=gc_after_trial,
                    show_progress_bar=show_progress_bar,
                )
            if driver.interrupted or driver.fatal is not None:
                raise SweepInterrupted
        except SweepInterrupted:
            if driver.fatal is not None:
                raise driver.fatal from None
            if driver.spent:
                _say_that_it_is_spent(study, driver)
                return
            _say_how_to_resume(study, driver)
            interrupt = KeyboardInterrupt()
            add_note(interrupt, INTERRUPTED)
            raise interrupt from None
        finally:
            if timeline is not None:
                _draw(driver.client, Path(timeline))
            driver.detach()


def _check_population(study: optuna.Study, n_trials: int | None, n_jobs: int) -> None:
    """Raise InvalidSweep for arguments that cannot be combined with a population."""
    if n_trials is not None or n_jobs != 1:
        raise InvalidSweep(
            "n_trials and n_jobs cannot be combined with population=: its size is the number of members, and they "
            "train until their objective returns or timeout= is reached. Leave them out"
        )
    if len(study.directions) > 1:
        raise InvalidSweep("a population compares its members by one value; this study has several objectives")


def _say_what_stays_behind(objective: Any, callbacks: Sequence[Callback]) -> None:
    names = left_behind(objective, callbacks)
    if names:
        logger.warning(
            "the objective changes %s, which a callback reads: trials run in their own processes, so the callback "
            "sees only this process's values. Pass them through the study (trial.set_user_attr, an artifact), or "
            "through a file",
            ", ".join(names),
        )


def driver_of(
    study: optuna.Study,
    template: TrialTemplate,
    client: SchedulerClient,
    embedded: EmbeddedScheduler | None,
    promise_metric: tuple[str, str] | None,
    trackers: Sequence[Tracker] = (),
) -> OptunaDriver:
    return OptunaDriver(
        study,
        client,
        template,
        reconnect=embedded.ensure if embedded is not None else _again,
        promise_direction=None if promise_metric is None else promise_metric[1],
        trackers=trackers,
    )


_at_work: set[Path] = set()
"""State folders of the sweeps that this process runs by a scheduler of their own."""


@contextmanager
def scheduler_for(
    study_name: str,
    own: OwnSlots,
    state_dir: str | os.PathLike[str] | None,
    *,
    preload: Sequence[str],
    settings: Mapping[str, str] = MappingProxyType({}),
    leaves_nothing: bool = False,
) -> Iterator[tuple[SchedulerClient, EmbeddedScheduler | None]]:
    """Yield the scheduler that ELASTUNE_URL names, or one of our own for the duration of the sweep.

    ``preload``: modules that the latter has in memory for the replicas that it starts; ``settings``: variables that
    those go by. ``leaves_nothing``: its folder goes when the sweep ends well, unless it was asked for.
    """
    named = SchedulerClient.from_environ()
    if named is not None:
        try:
            own.refuse_beside("ELASTUNE_URL")
            yield named, None
        finally:
            named.close()
        return
    folder = Path(state_dir) if state_dir is not None else Path(".elastune") / file_name(study_name)
    is_ours = state_dir is None and leaves_nothing and not folder.exists()
    with _alone_in(folder, study_name):
        embedded = EmbeddedScheduler(folder, **asdict(own), preload=preload, environ=settings)
        client = embedded.start()
        goes = False
        try:
            yield client, embedded
            goes = True
        except KeyboardInterrupt:
            # Nobody can go on with it: its study was in memory.
            goes = True
            raise
        finally:
            goes = goes and is_ours and not _has_failures(client)
            client.close()
            embedded.stop()
            if goes:
                _remove(folder)


@contextmanager
def _alone_in(folder: Path, study_name: str) -> Iterator[None]:
    """Refuse a second sweep of this process in the same state folder."""
    place = folder.resolve()
    if place in _at_work:
        raise InvalidSweep(
            f"optimize() is at work on study {study_name!r} in this process already (state folder {folder}). For "
            "trials at the same time pass n_jobs=; a callback can call study.enqueue_trial() or study.stop()"
        )
    _at_work.add(place)
    try:
        yield
    finally:
        _at_work.discard(place)


def _has_failures(client: SchedulerClient) -> bool:
    """Tell whether there is something in the folder that its people may want to read."""
    asking = SchedulerClient(client.url, client.token)
    try:
        return any(trial["state"] == "failed" for trial in asking.request("GET", "/trials"))
    except SchedulerError:
        return True
    finally:
        asking.close()


def _remove(folder: Path) -> None:
    """Remove the sweep's folder, unless somebody works in it by now, and an empty one around it."""
    try:
        held = StateFolder.acquire(folder, patience_seconds=0.0)
    except (StateFolderInUse, StoreUnavailable):
        return
    shutil.rmtree(folder, ignore_errors=True)
    held.release()
    with contextlib.suppress(OSError):
        folder.parent.rmdir()


def _check_amounts(n_trials: Any, timeout: Any, n_jobs: Any) -> None:
    """Raise InvalidSweep for amounts that Optuna would refuse once everything has been started."""
    if n_trials is not None and (not isinstance(n_trials, int) or isinstance(n_trials, bool) or n_trials < 0):
        raise InvalidSweep(f"n_trials is {n_trials!r}; it must be an integer of at least 0, or None for no limit")
    if timeout is not None and (not isinstance(timeout, int | float) or isinstance(timeout, bool) or timeout < 0):
        raise InvalidSweep(
            f"timeout is {timeout!r}; it must be a number of seconds of at least 0, or None for no limit"
        )
    if not isinstance(n_jobs, int) or isinstance(n_jobs, bool):
        raise InvalidSweep(f"n_jobs is {n_jobs!r}; it must be an integer")


def _again(client: SchedulerClient) -> SchedulerClient:
    """Return the client again: a scheduler named by ELASTUNE_URL comes back under its own address."""
    return client


def _remaining(study: optuna.Study, n_trials: int | None, driver: OptunaDriver, *, resume: bool) -> int | None:
    """Trials still to run: all asked for, or (resuming) what the sweep as a whole lacks."""
    interrupted = [trial.number for trial in driver.interrupted_trials()]
    if not resume:
        if interrupted:
            logger.warning(
                "trials %s of study %r were interrupted; pass resume=True to continue them",
                interrupted,
                study.study_name,
            )
        return n_trials
    trials = study.get_trials(deepcopy=False)
    if not trials:
        logger.warning(
            "study %r has no trials yet, so there is nothing to resume; create_study needs study_name= and "
            "load_if_exists=True to find an earlier one",
            study.study_name,
        )
    driver.adopt_interrupted()
    if n_trials is None:
        return None
    finished = sum(1 for trial in trials if trial.state.is_finished())
    # Interrupted trials are finished in any case, also when others have been run since.
    return max(n_trials - finished, len(interrupted), 0)


@contextmanager
def _marked_asks(study: optuna.Study, driver: OptunaDriver) -> Iterator[None]:
    """Have ``study.ask`` give out trials that bear the driver's mark before they run, one at a time.

    A driver killed right after Optuna began a trial would else leave one that a resumed sweep cannot tell from those
    of other processes. One at a time, because with SQLite two threads that look for a waiting trial at the same time
    both take the same one: a queued trial, or one that is being resumed, would run twice.
    """
    lock, plain = threading.Lock(), type(study)

    class Marking(plain):  # type: ignore[misc, valid-type]  # of the study's own class
        def ask(self, *args: Any, **kwargs: Any) -> optuna.Trial:
            with lock:
                driver.mark_next_trial()
                trial: optuna.Trial = super().ask(*args, **kwargs)
                return trial

        def __reduce_ex__(self, protocol: Any) -> Any:
            # Callbacks may pickle and copy the study: nothing of the sweep goes along.
            return _empty, (plain,), self.__getstate__()

    study.__class__ = Marking
    try:
        yield
    finally:
        study.__class__ = plain


def _empty(kind: type[optuna.Study]) -> optuna.Study:
    return kind.__new__(kind)


@contextmanager
def _interruptible(driver: OptunaDriver) -> Iterator[None]:
    """Let Ctrl-C reach every objective thread at once; Optuna alone would wait for running trials to end."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def handle(*_: Any) -> None:
        if driver.interrupted:
            raise KeyboardInterrupt
        driver.interrupt()

    before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def _display(driver: OptunaDriver, n_trials: int | None, *, live: bool | str) -> Iterator[None]:
    if not live:
        yield
        return
    if in_notebook():
        show_page(driver.client)
        yield
        return
    print(f"elastune: the sweep's page: {page_link(driver.client)}", file=sys.stderr)
    if live == "page":
        yield
        return
    from scheduler.dashboard.terminal import show_while

    def fetch() -> dict[str, Any]:
        overview: dict[str, Any] = driver.client.request("GET", "/overview", params={"study": driver.study_key})
        return overview

    with show_while(fetch, title=driver.study.study_name, total=n_trials):
        yield


def _say_that_it_is_spent(study: optuna.Study, driver: OptunaDriver) -> None:
    """Say that the budget is used: the sweep ends as one that has run all of its trials does."""
    words = f"elastune: the budget of study {study.study_name!r} is used up, so its sweep ends"
    if isinstance(study._storage, optuna.storages.InMemoryStorage):
        _give_up(study, driver, "its study's budget is used up, and the study was in memory")
        print(words, file=sys.stderr)
        return
    print(
        f"{words}. Unfinished trials have saved their state: raise the budget (`elastune set ... --budget HOURS`, or "
        "terms=), and run the same script with resume=True to continue",
        file=sys.stderr,
    )


def _give_up(study: optuna.Study, driver: OptunaDriver, why: str) -> None:
    """End the trials that nobody can resume, as failed ones: Optuna alone does so."""
    driver.cancel_all(why)
    for trial in driver.interrupted_trials():
        study.tell(trial.number, state=optuna.trial.TrialState.FAIL, skip_if_finished=True)


def _say_how_to_resume(study: optuna.Study, driver: OptunaDriver) -> None:
    if isinstance(study._storage, optuna.storages.InMemoryStorage):
        _give_up(study, driver, "the sweep was interrupted, and its study was in memory")
        print("elastune: interrupted; running trials were ended (the study was in memory)", file=sys.stderr)
        return
    print(
        "elastune: interrupted; running trials save their state. Run the same script with resume=True to continue",
        file=sys.stderr,
    )


def _draw(client: SchedulerClient, base: Path) -> None:
    from scheduler.dashboard.picture import draw_timeline

    try:
        path = draw_timeline(client.request("GET", "/timeline"), base)
    except (SchedulerError, OSError) as error:
        print(f"elastune: the timeline was not drawn: {error}", file=sys.stderr)
        return
    print(f"elastune: slots over time: {path}")


LEAST_MEMORY, MOST_GPUS = 0.1, 64
"""As `elastune up` takes them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnSlots:
    """None where the machine decides. Raises InvalidSweep for what cannot be."""

    slots: int | None
    emulate: str | None
    memory_per_slot: float | None
    """GiB."""
    gpus_per_slot: int | None

    def __post_init__(self) -> None:
        if self.slots is not None and self.slots < 1:
            raise InvalidSweep(f"slots is {self.slots}; it must be at least 1")
        if self.gpus_per_slot is not None and not 1 <= self.gpus_per_slot <= MOST_GPUS:
            raise InvalidSweep(f"gpus_per_slot is {self.gpus_per_slot}; it must be from 1 to {MOST_GPUS}")
        memory = self.memory_per_slot
        if memory is not None and not (math.isfinite(memory) and memory >= LEAST_MEMORY):
            raise InvalidSweep(f"memory_per_slot is {memory}; it must be a number of GiB of at least {LEAST_MEMORY}")
        if self.emulate is not None:
            from trials.launch.emulated import emulation

            try:
                emulation(self.emulate, slots=self.slots)
            except ValueError as error:
                raise InvalidSweep(str(error)) from error

    def refuse_beside(self, scheduler: str) -> None:
        """Raise InvalidSweep if slots were asked for and another scheduler has slots of its own."""
        for name, value in asdict(self).items():
            if value is not None:
                raise InvalidSweep(
                    f"{name}={value!r} was given, but {scheduler} names a scheduler that has its own slots; leave one "
                    "out"
                )
