"""The driver of an NNI experiment: a process beside NNI's manager, which starts it and talks to it in JSON lines.

In, on standard input: first the experiment, then ``{"submit": trial}``, ``{"cancel": trial, "why": ...}``,
``{"log": trial, "id": ...}`` and ``{"taken": number}``. Out, on standard output: ``{"ready": true}``, ``{"trial": ...,
"status": ...}``, ``{"trial": ..., "metric": ..., "order": ..., "number": ...}`` and ``{"id": ..., "log": ...}``.

A result is answered to its replica when NNI has written it down, so that none is lost and none comes out of order;
one that comes twice is known by its kind and order. When standard input ends, trials save their state and leave:
the experiment resumes with the same trials. When this process ends, the manager starts another, which adopts them.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import os
import re
import shlex
import shutil
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TextIO

import psutil

from scheduler.client.connection import SchedulerClient
from scheduler.errors import SchedulerError, SchedulerUnreachable
from scheduler.host.embedded import EmbeddedScheduler
from scheduler.state_folder import write_durably
from trials.errors import TrialsError
from trials.spec import sizes_from
from tuner_bridge.driving.exchange import flattened
from tuner_bridge.driving.sent_environ import sent_environ
from tuner_bridge.driving.study_driver import StudyDriver, file_name
from tuner_bridge.driving.template import TrialTemplate, own_python_path, sizes_within
from tuner_bridge.errors import BridgeError, SweepInterrupted
from tuner_bridge.in_replica.scripts import Script, is_own_python, program_of, starts_python
from tuner_bridge.nni.plain_json import check_metric, number_in
from tuner_bridge.trackers import trackers_named
from tuner_bridge.trackers.base import Tracker
from tuner_bridge.trackers.tracked_trial import TrackedTrial

KEPT = "tracked.json"
_STATES = {"succeeded": "complete", "cancelled": "pruned"}


class TrackedResults(TrackedTrial):
    """One trial's: its results as NNI takes them. ``folder``: NNI's of this trial."""

    def __init__(self, trackers: Sequence[Tracker], title: str, study_key: str, number: int, folder: Path) -> None:
        path = folder / KEPT
        kept: dict[str, str] = json.loads(path.read_text()) if path.exists() else {}
        super().__init__(trackers, title, study_key, number, kept)
        self._final: float | None = None
        if self.identities != kept:
            try:
                folder.mkdir(parents=True, exist_ok=True)
                write_durably(path, json.dumps(self.identities))
            except (OSError, TrialsError) as error:
                logger.warning(
                    "the tracked runs of trial %d were not saved, so an experiment that resumes begins new ones: %s",
                    number,
                    error,
                )

    def parameters(self, chosen: Mapping[str, Any]) -> None:
        for name, value in chosen.items():
            self.parameter(name, value)

    def took(self, metric: Mapping[str, Any]) -> None:
        value = metric.get("value")
        number = number_in(json.loads(value)) if isinstance(value, str) else None
        if number is None:
            return
        if metric["type"] == "PERIODICAL":
            self.report(number, metric["sequence"])
        else:
            self._final = number

    def ended(self, state: str, history: Sequence[str]) -> None:
        """Note the end of a trial; ``state``: the scheduler's word for it."""
        self.end(_STATES.get(state, "fail"), None if self._final is None else [self._final], history)


TUNERS = ("-m nni", "--exp_params")
"""Words of the command that starts tuner and assessor."""
LEAVING_SECONDS = 3.0


class Manager:
    def __init__(self, pid: int) -> None:
        self._process = psutil.Process(pid)
        self._children: set[psutil.Process] = set()

    def note_children(self) -> None:
        with contextlib.suppress(psutil.Error):
            self._children.update(self._process.children(recursive=True))

    def end_orphans(self) -> None:
        """End processes that a manager has left behind; one that stops in order ends its own."""
        with contextlib.suppress(psutil.TimeoutExpired):
            # Its connections close a moment before it is gone.
            self._process.wait(timeout=0.5)
        if self._process.is_running() and self._process.status() != psutil.STATUS_ZOMBIE:
            return
        orphans = [child for child in self._children if child.pid != os.getpid() and _is_tuner(child)]
        for orphan in orphans:
            logger.warning("the NNI manager was killed: ending its tuner pid=%d", orphan.pid)
            with contextlib.suppress(psutil.Error):
                orphan.terminate()
        for orphan in psutil.wait_procs(orphans, timeout=LEAVING_SECONDS)[1]:
            with contextlib.suppress(psutil.Error):
                orphan.kill()


def _is_tuner(process: psutil.Process) -> bool:
    try:
        # A shell may have started it, with all words in one.
        words = " ".join(process.cmdline())
    except psutil.Error:
        return False
    return all(each in words for each in TUNERS)


ADOPTION_SECONDS = 25.0
"""A manager that was killed keeps its study for the length of its lease; its successor waits for that."""

EXIT_UNREACHABLE = 75
"""The scheduler is lost (EX_TEMPFAIL); its trials go on, and are adopted by the next driver."""

PRELOAD = ("scipy.stats", "pandas", "json_tricks", "typeguard", "yaml", "requests")
"""Modules that NNI's package imports; itself it reads the environment when it is imported."""

OWN_IMPORT = ("nni", "tuner_bridge", "dist_core")
"""Packages that look at their process while they are imported, or are in memory already."""

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Trial:
    trial_id: str | None = None
    """The scheduler's name for it."""
    cancelled: str | None = None
    results_taken: int = 0
    """Intermediate results that NNI has: one more than the highest sequence."""


class ExperimentDriver:
    """Driver of an NNI experiment: submits its trials and answers its replicas.

    ``send``: delivers a message to NNI's manager, from any thread.
    """

    def __init__(
        self, experiment: Mapping[str, Any], driver: StudyDriver, send: Callable[[Mapping[str, Any]], None]
    ) -> None:
        self._experiment = experiment
        self._driver = driver
        self._send = send
        self._trials: dict[str, _Trial] = {}
        self._results = itertools.count()
        self._trackers = trackers_named(experiment.get("trackers") or ())
        self._unconfirmed_results: dict[int, threading.Event] = {}
        self._numbers: dict[str, int] = {}
        self._adoptable_trials: dict[str, str] = {}
        """Trials that an earlier driver has submitted, by NNI's name."""
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []
        self._last_submitted = threading.Event()
        """Set when the trial that came last has reached the scheduler, or has failed to."""
        self._last_submitted.set()
        self.template = self._make_template()

    def _make_template(self) -> TrialTemplate:
        folder = self._experiment["code_dir"]
        script = as_script(self._experiment["command"], folder)
        least = self._experiment["min_replicas"]
        asked = sizes_from(self._experiment.get("slots_per_replica") or 1)
        sizes = sizes_within(asked, least, self._driver.slots, "minReplicas")
        room = self._driver.slots // sizes[0]
        most = max(least, min(self._experiment.get("max_replicas") or room, room))
        payload: dict[str, Any] = {"command": self._experiment["command"]}
        if script is not None:
            payload["script"] = script.to_json()
        elif self._experiment["min_replicas"] > 1:
            raise BridgeError(
                f"minReplicas is {self._experiment['min_replicas']}, but the trial command "
                f"{self._experiment['command']!r} does not start a Python script with {sys.executable}, so it can "
                "only run on one replica. Make it 'python script.py ...'"
            )
        modules = () if script is None else script.imports()
        module = "tuner_bridge.nni.replica"
        return TrialTemplate(
            entrypoint=f"{module}:{'run_command' if script is None else 'main'}",
            payload=payload,
            min_replicas=least,
            max_replicas=1 if script is None else most,
            replica_sizes=sizes,
            working_dir=folder,
            environ=sent_environ(None),
            python_path=tuple(dict.fromkeys((folder, *own_python_path()))),
            preload=(*PRELOAD, *(name for name in modules if name.partition(".")[0] not in OWN_IMPORT), module),
        )

    def know_earlier_trials(self) -> None:
        """Learn the numbers of the experiment's trials in the scheduler; NNI's may come twice after a resume."""
        for summary in self._driver.client.request("GET", "/trials"):
            if summary["study"] == self._driver.study_key:
                spec = self._driver.client.request("GET", f"/trials/{summary['trial_id']}")["spec"]
                name = spec["payload"]["nni"]["trial"]
                self._numbers[name] = summary["number"]
                self._adoptable_trials[name] = summary["trial_id"]

    def handle(self, message: Mapping[str, Any]) -> None:
        if "submit" in message:
            self._submit(message["submit"])
        elif "cancel" in message:
            self._cancel(message["cancel"], message["why"])
        elif "taken" in message:
            with self._lock:
                taken = self._unconfirmed_results.pop(message["taken"], None)
            if taken is not None:
                taken.set()
        elif "log" in message:
            self._send({"id": message["id"], "log": self._log_of(message["log"])})

    def close(self) -> None:
        """Let the trials be: they save their state, and resume with the experiment."""
        self._driver.interrupt()
        with self._lock:
            untaken = list(self._unconfirmed_results.values())
        for taken in untaken:
            taken.set()
        for thread in self._threads:
            thread.join(timeout=10.0)

    # ------------------------------------------------------------------ one trial

    def _submit(self, trial: Mapping[str, Any]) -> None:
        name = trial["trial"]
        with self._lock:
            if name in self._trials:
                return
            self._trials[name] = _Trial(results_taken=trial.get("taken", 0))
            if name not in self._numbers:
                taken = set(self._numbers.values())
                self._numbers[name] = (
                    trial["sequence"] if trial["sequence"] not in taken else max(taken, default=-1) + 1
                )
        before, self._last_submitted = self._last_submitted, threading.Event()
        thread = threading.Thread(
            target=self._run, args=(trial, before, self._last_submitted), name=f"trial-{name}", daemon=True
        )
        self._threads = [each for each in self._threads if each.is_alive()] + [thread]
        thread.start()

    def _run(self, trial: Mapping[str, Any], before: threading.Event, is_submitted: threading.Event) -> None:
        """Run a trial.

        Trials reach the scheduler in NNI's order, so that those that have to wait are the later ones.
        """
        name = trial["trial"]
        entry = self._trials[name]
        nni = {
            "experiment": self._experiment["experiment"],
            "trial": name,
            "sequence": trial["sequence"],
            "parameter": trial["parameter"],
            "direction": self._experiment["direction"],
            "folder": os.path.join(self._experiment["trials_dir"], name),
        }
        spec = self.template.trial(self._driver.study_key, self._numbers[name], nni=nni)
        chosen = _parameters_of(trial["parameter"])

        def submitted(trial_id: str) -> None:
            is_submitted.set()
            self._driver.parameters.note(trial_id, chosen)
            with self._lock:
                entry.trial_id = trial_id
            if entry.cancelled is not None:
                self._cancel_soon(trial_id, entry.cancelled)

        before.wait()
        try:
            tracked = self._tracked(name, chosen)
            spec = replace(spec, environ={**spec.environ, **tracked.environ})

            def watch(live: Mapping[str, Any]) -> None:
                self._tell_status(name, live)
                tracked.live(live)

            try:
                ended = self._driver.run_trial(spec, self._answer(name, tracked), watch, submitted)
            except BaseException:
                tracked.leave()
                raise
        except SweepInterrupted:
            return
        except Exception as error:
            logger.exception("trial %s", name)
            self._send({"trial": name, "status": "FAILED", "message": str(error)})
            return
        finally:
            is_submitted.set()
        self._tell_end(name, ended)
        if self._trackers:
            tracked.ended(ended["state"], self._driver.history(ended["trial_id"]))

    def _tracked(self, name: str, chosen: Mapping[str, Any]) -> TrackedResults:
        title = self._experiment.get("name") or self._experiment["experiment"]
        folder = Path(self._experiment["trials_dir"], name)
        tracked = TrackedResults(self._trackers, title, self._driver.study_key, self._numbers[name], folder)
        tracked.parameters(chosen)
        return tracked

    def _answer(self, name: str, tracked: TrackedResults) -> Callable[[str, dict[str, Any]], Any]:
        trial = self._trials[name]

        def answer(method: str, arguments: dict[str, Any]) -> Any:
            if method == "taken":
                return trial.results_taken
            if method not in ("metric", "metrics"):
                raise ValueError(f"replicas of an NNI trial may ask for 'metric', 'metrics' or 'taken', not {method!r}")
            results = arguments["metrics"] if method == "metrics" else [arguments]
            for result in results:
                check_metric(result["metric"])
            # The manager writes them down one after the other, in this order.
            for taken in [self._pass_on(name, result) for result in results]:
                taken.wait()
            if self._driver.interrupted:
                # Perhaps not written down: the trial tells it again when the experiment resumes.
                raise SweepInterrupted
            for metric in (json.loads(result["metric"]) for result in results):
                if metric["type"] != "PERIODICAL" or metric["sequence"] >= trial.results_taken:
                    tracked.took(metric)
                if metric["type"] == "PERIODICAL":
                    trial.results_taken = max(trial.results_taken, metric["sequence"] + 1)
            return None

        return answer

    def _pass_on(self, name: str, result: Mapping[str, Any]) -> threading.Event:
        """Set when the manager has written the result down."""
        taken = threading.Event()
        with self._lock:
            number = next(self._results)
            self._unconfirmed_results[number] = taken
        self._send({"trial": name, "metric": result["metric"], "order": result["order"], "number": number})
        return taken

    def _tell_status(self, name: str, live: Mapping[str, Any]) -> None:
        runs = live["state"] not in ("pending", "paused")
        message = f"{live['reason']['sentence']}" if not runs else f"{live['slots']} replicas"
        self._send({"trial": name, "status": "RUNNING" if runs else "WAITING", "message": message})

    def _tell_end(self, name: str, ended: Mapping[str, Any]) -> None:
        outcome = ended["outcome"]
        status = {"succeeded": "SUCCEEDED", "cancelled": "SYS_CANCELED"}.get(ended["state"], "FAILED")
        sentence = ended["reason"]["sentence"]
        if status == "FAILED" and outcome is not None:
            sentence = f"{outcome['error_type']}: {outcome['message']}"
        self._send({"trial": name, "status": status, "message": sentence})

    def _cancel(self, name: str, why: str) -> None:
        with self._lock:
            trial = self._trials.get(name)
            if trial is not None:
                trial.cancelled = why
            trial_id = self._adoptable_trials.get(name) if trial is None else trial.trial_id
        if trial_id is not None:
            self._cancel_soon(trial_id, why)

    def _cancel_soon(self, trial_id: str, why: str) -> None:
        """Cancel a trial in a thread, also when the scheduler is away; meanwhile this one listens to the manager."""
        threading.Thread(target=self._driver.cancel_for_sure, args=(trial_id, why), daemon=True).start()

    def _log_of(self, name: str) -> str:
        trial = self._trials.get(name)
        if trial is None or trial.trial_id is None:
            return "this trial has not been started yet\n"
        try:
            answer = self._driver.client.request("GET", f"/trials/{trial.trial_id}/log")
        except SchedulerError as error:
            return f"the log cannot be read now: {error}\n"
        return "".join(f"==> {each['replica_id']} <==\n{each['words']}\n" for each in answer)


def main() -> int:
    """Serve one experiment until standard input ends."""
    out = _take_standard_output()
    lock = threading.Lock()

    def send(message: Mapping[str, Any]) -> None:
        with lock, contextlib.suppress(BrokenPipeError):
            out.write(json.dumps(message) + "\n")
            out.flush()

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s: %(message)s")
    experiment = json.loads(sys.stdin.readline())
    try:
        _serve(experiment, send)
    except SchedulerUnreachable as error:
        # The manager starts another driver, which may find it again.
        logger.error("%s", error)
        return EXIT_UNREACHABLE
    except (SchedulerError, BridgeError, TrialsError) as error:
        send({"refused": str(error)})
        return 1
    return 0


def _serve(experiment: Mapping[str, Any], send: Callable[[Mapping[str, Any]], None]) -> None:
    with contextlib.ExitStack() as held:
        if experiment.get("scheduler_url"):
            os.environ["ELASTUNE_URL"] = experiment["scheduler_url"]
        client = SchedulerClient.from_environ()
        reconnect: Callable[[SchedulerClient], SchedulerClient] = lambda client: client  # noqa: E731
        if client is None:
            embedded = EmbeddedScheduler(
                Path(experiment["state_dir"]),
                slots=experiment.get("slots"),
                slots_per_gpu=experiment.get("slots_per_gpu"),
                gpus_per_slot=experiment.get("gpus_per_slot"),
                memory_per_slot=experiment.get("memory_per_slot"),
                fork_server=experiment.get("warm_start", True),
            )
            held.callback(embedded.stop)
            client = embedded.start()
            reconnect = embedded.ensure
        driver = StudyDriver(
            f"nni-{file_name(experiment['experiment'])}",
            experiment["direction"],
            client,
            reconnect=reconnect,
            title=experiment.get("name") or "",
        )
        driver.attach(experiment["terms"], patience_seconds=ADOPTION_SECONDS)
        held.callback(driver.detach)
        served = ExperimentDriver(experiment, driver, send)
        served.know_earlier_trials()
        held.callback(served.close)
        # Standard input would keep this thread waiting.
        driver.on_fatal = lambda: os._exit(EXIT_UNREACHABLE)
        send({"ready": True, "scheduler": driver.client.url, "study": driver.study_key, "slots": driver.slots})
        manager = Manager(os.getppid())
        for line in sys.stdin:
            manager.note_children()
            served.handle(json.loads(line))
        manager.end_orphans()


def _take_standard_output() -> TextIO:
    """Return the line to the manager; what anything else prints goes to standard error."""
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return out


def _parameters_of(text: str) -> dict[str, Any]:
    """Return the parameters that NNI's tuner has chosen, as far as they can be read without NNI."""
    try:
        found = json.loads(text)
    except ValueError:
        return {}
    chosen = found.get("parameters") if isinstance(found, dict) else None
    return flattened(chosen) if isinstance(chosen, dict) else {}


_SHELL = re.compile(r"[|&;<>()$`*?{}\[\]\\\n]|(^|\s)[~#]")
"""Characters by which a command asks for a shell."""


def as_script(command: str, folder: str, path: str | None = None) -> Script | None:
    """Return the Python script that a command runs; None if it needs a shell or another interpreter."""
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise BridgeError(
            f"the trial command {command!r} cannot be parsed ({error}); correct its quotes in trialCommand"
        ) from None
    if not words or not starts_python(words[0]):
        return None
    # Quoted, such characters are the script's own.
    if _SHELL.search(re.sub(r"'[^']*'", "", command)) or not _is_this_python(words[0], path):
        return None
    return program_of(words[1:], folder)


def _is_this_python(name: str, path: str | None) -> bool:
    found = shutil.which(name, path=path)
    return found is not None and is_own_python(found)


if __name__ == "__main__":
    sys.exit(main())
