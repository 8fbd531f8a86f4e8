"""Optuna's driver: owns the real ``optuna.Trial`` objects, on which the replicas' calls are made."""

from __future__ import annotations

import logging
import math
import re
import sys
import threading
import time
import uuid
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, IntDistribution, distribution_to_json
from optuna.storages._heartbeat import is_heartbeat_enabled

from dist_core.older_python import add_note
from scheduler.client.connection import SchedulerClient
from scheduler.errors import SchedulerError
from tuner_bridge.driving.study_driver import StudyDriver, file_name
from tuner_bridge.driving.template import TrialTemplate
from tuner_bridge.errors import InvalidSweep, TrialLost
from tuner_bridge.in_replica.wire import NOT_A_NUMBER, decode_exception, decode_value
from tuner_bridge.optuna.ahead import LookAhead, index_of, is_same, suggest
from tuner_bridge.optuna.population import ELASTIC, MORE_EPOCHS, PARENT
from tuner_bridge.optuna.stages import SHARED_EPOCHS, Branch, StageTree
from tuner_bridge.trackers.base import Tracker
from tuner_bridge.trackers.tracked_trial import ATTRIBUTE, TrackedTrial

logger = logging.getLogger(__name__)

TRIAL_ATTRIBUTE = "elastune:trial"
STUDY_ATTRIBUTE = "elastune:study"
Follow = Callable[[optuna.Trial, int, float, bool], optuna.Trial | None]
"""Told a trial's report, its step and value, and whether it is of the last epoch: the trial that later ones belong to.

None: the objective is to end."""


@dataclass(frozen=True, slots=True)
class Begun:
    """Elastic trial that an Optuna trial goes on in: one that the scheduler has already."""

    first: optuna.trial.FrozenTrial
    """Optuna trial that it was submitted for, whose number it has."""
    reported: frozenset[int]
    """Steps that were reported for it so far, for any Optuna trial."""


SUGGESTIONS = ("suggest_float", "suggest_int", "suggest_categorical")
SHOW_SECONDS = 5.0
"""Between two notes of one trial's goodput for Optuna's dashboard; another number of replicas is noted at once."""


class OptunaDriver(StudyDriver):
    """Answers the calls of replicas on the ``optuna.Trial`` objects of a study.

    ``promise_direction``: of the metric that the scheduler judges trials by; None: the study's first objective.
    """

    def __init__(
        self,
        study: optuna.Study,
        client: SchedulerClient,
        template: TrialTemplate,
        *,
        reconnect: Callable[[SchedulerClient], SchedulerClient],
        promise_direction: str | None = None,
        trackers: Sequence[Tracker] = (),
    ) -> None:
        self._is_known = STUDY_ATTRIBUTE in study.user_attrs
        """True if it has been driven before, or is a copy of one that was."""
        direction = promise_direction or study.directions[0].name.lower()
        super().__init__(_study_key(study), direction, client, reconnect=reconnect, title=study.study_name)
        self.study = study
        self.template = template
        self._trackers = trackers
        self._sampler_lock = threading.Lock()
        self._look_ahead = LookAhead(study)
        self._stages: StageTree | None = None
        self.keeps_states = False
        """Keep the states that trials end with, for others to begin with."""
        self._parents: dict[int, str] = {}
        """Elastic trials that trials begin from, by the number of the latter, where these are known already."""
        self.on_wish = self._queue
        self.ends_when_spent = True

    def attach(self, terms: Mapping[str, Any] | None = None, *, patience_seconds: float = 0.0) -> None:
        """Become the study's driver. A copied study gets a key of its own; see `StudyDriver.attach`."""
        if self._is_known:
            self._leave_to_the_original()
        super().attach(terms, patience_seconds=patience_seconds)
        self.code.offer(self.template.contents)

    def submitted(self) -> list[Mapping[str, Any]]:
        """Return the scheduler's trials of the study, those that are over among them."""
        trials = self._once_reached(lambda: self.client.request("GET", "/trials"))
        return [each for each in trials if each["study"] == self.study_key]

    def _leave_to_the_original(self) -> None:
        """Take another key where the scheduler has trials under this one that the study's storage never gave out.

        The key travels with whatever copies a study: files, backups, pickles.
        """
        taken = self.submitted()
        marks = {trial.number: trial.user_attrs.get(TRIAL_ATTRIBUTE) for trial in self.study.get_trials(deepcopy=False)}
        if any(marks.get(each["number"]) != self.study_key for each in taken):
            self.study.set_user_attr(STUDY_ATTRIBUTE, uuid.uuid4().hex[:8])
            self.study_key = self._within(_study_key(self.study))
            logger.warning(
                "study %r is a copy: the scheduler has trials of it that its storage does not have; from now on it "
                "is a separate study",
                self.study.study_name,
            )

    def _queue(self, parameters: Mapping[str, Any], parent: int | None, more_epochs: int) -> None:
        """Queue a trial with these parameters, which begins where its parent stands."""
        if self.left == 0:
            raise ValueError(
                "the sweep has submitted all of its trials; start it again with resume=True and a larger n_trials"
            )
        attributes = {} if parent is None else {PARENT: parent}
        if more_epochs:
            attributes[MORE_EPOCHS] = more_epochs
        self.study.enqueue_trial(_within_space(self.study, parameters), user_attrs=attributes)

    def adopt_interrupted(self) -> int:
        """Queue again the trials that a dead driver of this study left running; returns how many.

        Optuna's own loop then takes them up as it does enqueued trials: same number, same parameters.
        """
        interrupted = self.interrupted_trials()
        storage = self.study._storage
        for trial in interrupted:
            if is_heartbeat_enabled(storage):
                # Else Optuna would fail it as stale before it is taken up.
                storage.record_heartbeat(trial._trial_id)  # type: ignore[attr-defined]  # only storages with heartbeat
            storage.set_trial_state_values(trial._trial_id, optuna.trial.TrialState.WAITING)
        return len(interrupted)

    def interrupted_trials(self) -> list[optuna.trial.FrozenTrial]:
        """Trials of this study's sweeps that Optuna holds to be running; before ours begins nobody runs them."""
        running = self.study.get_trials(deepcopy=False, states=(optuna.trial.TrialState.RUNNING,))
        return [trial for trial in running if TRIAL_ATTRIBUTE in trial.user_attrs]

    def mark_next_trial(self) -> None:
        """Mark the trial that ``study.ask`` is about to give out, making one where none waits.

        The mark is there before the trial runs: whatever happens from then on, a resumed sweep knows it for its own.
        """
        waiting = self.study.get_trials(deepcopy=False, states=(optuna.trial.TrialState.WAITING,))
        if not waiting:
            mark = {TRIAL_ATTRIBUTE: self.study_key}
            self.study.add_trial(optuna.trial.create_trial(state=optuna.trial.TrialState.WAITING, user_attrs=mark))
        elif waiting[0].user_attrs.get(TRIAL_ATTRIBUTE) != self.study_key:
            self.study._storage.set_trial_user_attr(waiting[0]._trial_id, TRIAL_ATTRIBUTE, self.study_key)

    def share_stages(self, stages: Mapping[str, int]) -> None:
        """Have trials that differ only in these parameters share the epochs before the first that they matter in."""
        if stages:
            # What a trial has asked for decides with whom it shares: nothing may be on its way.
            self._look_ahead.draws = False
            self._stages = StageTree(stages, lambda: self.interrupted or self.fatal is not None)

    def _plans(self) -> dict[str, Any] | None:
        plans = super()._plans()
        if plans is not None and self._stages is not None:
            plans["at_a_time"] = max(1, plans["at_a_time"] - self._stages.waiting)
        return plans

    def begins_with(self, number: int, parent_id: str) -> None:
        """Have the trial of that number begin with the state of an elastic trial."""
        self._parents[number] = parent_id

    def parent_of(self, trial: optuna.Trial) -> str:
        """Return the elastic trial whose state this one begins with; empty for none."""
        number = trial.user_attrs.get(PARENT)
        if number is None or trial.number in self._parents:
            return self._parents.get(trial.number, "")
        stretch = next((each for each in self.study.get_trials(deepcopy=False) if each.number == number), None)
        if stretch is not None and ELASTIC in stretch.user_attrs:
            return str(stretch.user_attrs[ELASTIC])
        matching = [each for each in self.submitted() if each["number"] == number]
        if not matching:
            raise InvalidSweep(
                f"trial {trial.number} is to begin with the state of trial {number}, which the scheduler "
                "does not know: name a trial of this study whose state was kept (optimize(..., keep_states=True))"
            )
        return str(matching[0]["trial_id"])

    def run(
        self,
        trial: optuna.Trial,
        *,
        follow: Follow = lambda trial, step, value, is_last: trial,
        submitted: Callable[[str], None] = lambda trial_id: None,
        begun: Begun | None = None,
    ) -> Any:
        """Run the objective as Optuna calls it: return the value, raise TrialPruned or the objective's exception.

        ``follow``: may have other trials of the study follow this one while its elastic trial trains on. ``submitted``:
        told the elastic trial's id. ``begun``: the elastic trial that it goes on in; None: one of its own.
        """
        prunes = not isinstance(self.study.pruner, optuna.pruners.NopPruner)
        if trial.user_attrs.get(TRIAL_ATTRIBUTE) != self.study_key:
            trial.set_user_attr(TRIAL_ATTRIBUTE, self.study_key)
        first = trial if begun is None else begun.first
        spec = self.template.trial(self.study_key, first.number, storage_id=first._trial_id, prunes=prunes)
        tracked = self._tracked(first)
        branch = self._branch_of(trial)
        spec = replace(
            spec,
            environ={**spec.environ, **tracked.environ},
            parent=branch.parent_id or (self.parent_of(trial) if begun is None else ""),
            parent_epoch=branch.shared_epochs,
            keep_after=branch.keep_after,
            more_epochs=trial.user_attrs.get(MORE_EPOCHS, 0),
            keep_state=self.keeps_states,
        )

        trial_ids: list[str] = []

        def has_id(trial_id: str) -> None:
            trial_ids.append(trial_id)
            submitted(trial_id)
            if self._stages is not None:
                self._stages.note_submitted(trial.number, trial_id)
            if trial.params:
                # It has been here before.
                self.parameters.note(trial_id, trial.params)

        def note(values: Mapping[str, Any]) -> None:
            self.parameters.note(trial_ids[0], values)

        if branch.parent is not None:
            follow = _with_reports_of(branch.parent, follow)
        reported = _reported_steps(trial) if begun is None else set(begun.reported)
        ask = Questions(trial, self._look_ahead, tracked, note, self._sampler_lock, follow, reported)
        display = _Display(lambda: ask.trial)

        def watch(live: Mapping[str, Any]) -> None:
            display(live)
            tracked.live(live)
            if self._stages is not None:
                self._stages.note_live(trial.number, live)

        try:
            ended = self.run_trial(spec, ask, watch, has_id)
        except BaseException:
            tracked.leave()
            raise
        finally:
            ask.close()
            if self._stages is not None:
                self._stages.note_end(trial.number, lambda: self._kept_after(trial_ids))
        display.close()
        if self._trackers:
            _end_tracked(tracked, ended, self.history(ended["trial_id"]))
        return _conclude(ended)

    def _branch_of(self, trial: optuna.Trial) -> Branch:
        """Return where a trial begins among those that share epochs; raises SweepInterrupted."""
        if self._stages is None or PARENT in trial.user_attrs:
            return Branch(shared_epochs=trial.user_attrs.get(SHARED_EPOCHS, 0))

        def draw(name: str, space: BaseDistribution) -> Any:
            with self._sampler_lock:
                return suggest(trial, name, space)

        branch = self._stages.branch(trial, draw)
        if branch.parent is not None:
            trial.set_user_attr(SHARED_EPOCHS, branch.shared_epochs)
            trial.set_user_attr(PARENT, branch.parent.number)
        return branch

    def _kept_after(self, trial_ids: Sequence[str]) -> list[int]:
        """Return the epochs after which an elastic trial's state was kept."""
        if not trial_ids or self.interrupted or self.fatal is not None:
            return []
        try:
            return list(self.client.request("GET", f"/trials/{trial_ids[0]}")["kept_after"])
        except SchedulerError:
            return []

    def _tracked(self, trial: optuna.Trial | optuna.trial.FrozenTrial) -> TrackedTrial:
        kept = trial.user_attrs.get(ATTRIBUTE, {})
        tracked = TrackedTrial(self._trackers, self.study.study_name, self.study_key, trial.number, kept)
        if tracked.identities != kept and isinstance(trial, optuna.Trial):
            trial.set_user_attr(ATTRIBUTE, tracked.identities)
        return tracked


def _with_reports_of(parent: optuna.Trial, follow: Follow) -> Follow:
    """Let a trial have its parent's reports of the epochs that they share, which end where its own begin."""

    def note(trial: optuna.Trial, step: int, value: float, is_last: bool) -> optuna.Trial | None:
        if len(_reported_steps(trial)) == 1:
            reported = parent.study._storage.get_trial(parent._trial_id).intermediate_values
            for before in sorted(each for each in reported if each < step):
                trial.report(reported[before], before)
        return follow(trial, step, value, is_last)

    return note


class _Display:
    """Notes of a running trial, as user attributes that Optuna's dashboard shows."""

    def __init__(self, trial: Callable[[], optuna.Trial]) -> None:
        self._trial = trial
        self._replicas: int | None = None
        self._postponed_row: Mapping[str, Any] | None = None
        self._noted_at = float("-inf")

    def __call__(self, live: Mapping[str, Any]) -> None:
        try:
            self._note(live)
        except Exception as error:
            # A storage that is away shows at the next question; a display is not worth a trial.
            logger.debug("not noted: %s", error)

    def close(self) -> None:
        """Note what was put off, before Optuna closes the trial."""
        if self._postponed_row is not None:
            self._noted_at = float("-inf")
            self(self._postponed_row)

    def _note(self, live: Mapping[str, Any]) -> None:
        if live["replicas"] != self._replicas:
            self._replicas = live["replicas"]
            self._trial().set_user_attr("elastune:replicas", self._replicas)
            self._noted_at = float("-inf")
        if not live.get("goodput"):
            return
        self._postponed_row = live
        if time.monotonic() - self._noted_at > SHOW_SECONDS:
            self._noted_at, self._postponed_row = time.monotonic(), None
            self._trial().set_user_attr("elastune:goodput", live["goodput"])
            self._trial().set_user_attr("elastune:batch", live["batch"])


def _end_tracked(tracked: TrackedTrial, ended: Mapping[str, Any], history: Sequence[str]) -> None:
    """Tell the trackers what Optuna is going to hear."""
    try:
        value = _conclude(ended)
    except optuna.TrialPruned:
        tracked.end("pruned", None, history)
    except Exception as error:
        tracked.end("fail", None, (*history, f"{type(error).__name__}: {error}"))
    else:
        values = [float(each) for each in (value if isinstance(value, (list, tuple)) else [value])]
        failed = any(math.isnan(each) for each in values)
        tracked.end("fail" if failed else "complete", None if failed else values, history)


class Questions:
    """Answers what the replicas of one trial ask of the real one.

    ``note`` is told the parameters that the trial turns out to have. ``lock``: samplers are not written for several
    threads; the trials of a study take turns.
    """

    def __init__(
        self,
        trial: optuna.Trial,
        look_ahead: LookAhead,
        tracked: TrackedTrial,
        note: Callable[[Mapping[str, Any]], None],
        lock: threading.Lock,
        follow: Follow = lambda trial, step, value, is_last: trial,
        reported: Collection[int] | None = None,
    ) -> None:
        self.trial = trial
        """Trial that the objective's present reports belong to."""
        self._is_to_end = False
        self._follow = follow
        self._look_ahead = look_ahead
        self._tracked = tracked
        self._note = note
        self._lock = lock
        self._reported = _reported_steps(trial) if reported is None else set(reported)

    def __call__(self, method: str, arguments: dict[str, Any]) -> Any:
        """Call a method of the real trial; raise what it raises."""
        with self._lock:
            is_last = bool(arguments.pop("is_last", False))
            values = self._look_ahead.take(self.trial, arguments.pop("took", ()))
            try:
                # A trial that resumed from its checkpoint reports again what it had reported; the first value stays.
                for step, value in arguments.pop("reports", ()):
                    self._report(value, step, is_last)
                if method == "report":
                    return self._report(arguments["value"], arguments["step"], is_last)
                if self._is_to_end:
                    raise optuna.TrialPruned("another trial goes on in its place")
                if method not in SUGGESTIONS:
                    return _call(self.trial, method, arguments)
                asker = arguments.pop("asker")
                name, choices = arguments["name"], arguments.get("choices")
                values[name], ahead = self._look_ahead.suggest(self.trial, method, arguments, asker)
                return {"value": values[name] if choices is None else index_of(choices, values[name]), "ahead": ahead}
            finally:
                for each, value in values.items():
                    self._tracked.parameter(each, value)
                if values:
                    self._note(values)

    def _report(self, value: Any, step: Any, is_last: bool) -> None:
        if step in self._reported or self._is_to_end:
            return
        self.trial.report(value, step)
        self._tracked.report(float(value), int(step))
        self._reported.add(int(step))
        following = self._follow(self.trial, int(step), float(value), is_last)
        if following is None:
            self._is_to_end = True
        else:
            self.trial = following

    def close(self) -> None:
        """Forget a trial that is over."""
        with self._lock:
            self._look_ahead.close(self.trial)


def _call(trial: optuna.Trial, method: str, arguments: dict[str, Any]) -> Any:
    if method == "reports":
        return None
    if method == "last_report":
        values = trial.study._storage.get_trial(trial._trial_id).intermediate_values
        return values[max(values)] if values else None
    if method == "should_prune":
        return trial.should_prune()
    if method in ("set_user_attr", "set_constraint"):
        return getattr(trial, method)(arguments["key"], arguments["value"])
    if method == "set_system_attr":
        # Optuna's own notes: artifacts, scores of a cross-validation.
        return trial.study._storage.set_trial_system_attr(trial._trial_id, arguments["key"], arguments["value"])
    if method == "distributions":
        return {name: distribution_to_json(value) for name, value in trial.distributions.items()}
    if method in ("user_attrs", "system_attrs", "constraints"):
        return getattr(trial, method)
    if method == "datetime_start":
        return trial.datetime_start.isoformat() if trial.datetime_start is not None else None
    if method == "study":
        return _of_study(trial.study, arguments["name"])
    if method == "stop_study":
        return trial.study.stop()
    if method == "set_study_user_attr":
        return trial.study.set_user_attr(arguments["key"], arguments["value"])
    raise ValueError(f"an elastic trial has no method {method!r}")


def _of_study(study: optuna.Study, name: str) -> Any:
    if name == "direction":
        return study.direction.name
    if name == "directions":
        return [direction.name for direction in study.directions]
    if name in ("study_name", "user_attrs", "best_value", "best_params", "metric_names"):
        return getattr(study, name)
    raise ValueError(f"{name!r} of the study is not available in a replica")


def _conclude(summary: Mapping[str, Any]) -> Any:
    """Return what Optuna gets to hear of a trial that is over."""
    outcome = summary["outcome"]
    if summary["state"] == "cancelled":
        raise optuna.TrialPruned(summary["reason"]["sentence"])
    if outcome is None:
        raise TrialLost(f"trial {summary['number']} was given up: {summary['reason']['sentence']}")
    if outcome["kind"] == "value":
        return decode_value(outcome["value"])
    if outcome["kind"] == "pruned":
        raise optuna.TrialPruned(outcome["message"])
    if outcome["error_type"] == NOT_A_NUMBER:
        # Optuna itself says that this is a failure, and goes on.
        return float("nan")
    error = decode_exception(outcome["value"])
    add_note(error, "raised in a replica:\n" + outcome["traceback"])
    name = _name_missed(error, outcome["traceback"])
    if name and hasattr(sys.modules["__main__"], name):
        add_note(
            error,
            f"{name!r} is a global of the script, but replicas have those only that the objective's code names, and "
            f"not what it looks up by a text, as by globals() or eval(): let it read a dictionary {{{name!r}: {name}}}",
        )
    raise error


def _name_missed(error: BaseException, traceback: str) -> str:
    """Return the global that an error says is not there; empty if it says nothing of the kind."""
    if isinstance(error, KeyError) and error.args and isinstance(error.args[0], str):
        return error.args[0] if re.search(r"globals\(\)|vars\(|__dict__", traceback) else ""
    found = re.search(r"^name '(\w+)' is not defined|^module '__main__' has no attribute '(\w+)'", str(error))
    return "" if found is None else found[1] or found[2]


def _within_space(study: optuna.Study, parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values as the study's own trials have them; raise ValueError for one that it would never draw.

    They come as a display has them: of a categorical choice its text.
    """
    spaces: dict[str, Any] = {}
    for trial in study.get_trials(deepcopy=False):
        spaces.update(trial.distributions)
    fitting = {}
    for name, value in parameters.items():
        space = spaces.get(name)
        if space is None:
            raise ValueError(f"no trial of the study has a parameter {name!r}; it has {', '.join(sorted(spaces))}")
        if isinstance(space, CategoricalDistribution):
            same = [each for each in space.choices if is_same(each, value)]
            same = same or [each for each in space.choices if str(each)[:200] == str(value)]
            if not same:
                raise ValueError(f"{name} is {value!r}; the study chooses among {', '.join(map(str, space.choices))}")
            fitting[name] = same[0]
            continue
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not space._contains(float(value)):
            raise ValueError(f"{name} is {value!r}; the study draws it from {space.low} to {space.high}")
        fitting[name] = int(value) if isinstance(space, IntDistribution) else float(value)
    return fitting


def _reported_steps(trial: optuna.Trial) -> set[int]:
    return set(trial.study._storage.get_trial(trial._trial_id).intermediate_values)


def _study_key(study: optuna.Study) -> str:
    """Return the study's name among all studies of a scheduler: two databases may hold studies of one name."""
    attributes = study.user_attrs
    if STUDY_ATTRIBUTE not in attributes:
        study.set_user_attr(STUDY_ATTRIBUTE, uuid.uuid4().hex[:8])
        attributes = study.user_attrs
    readable = file_name(study.study_name)[:80]
    return f"{readable}-{attributes[STUDY_ATTRIBUTE]}"
