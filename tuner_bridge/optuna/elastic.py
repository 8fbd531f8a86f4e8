"""``elastic``: a plain objective for an untouched ``study.optimize``."""

from __future__ import annotations

import atexit
import contextlib
import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import optuna

from trials.terms import StudyTerms
from tuner_bridge.errors import InvalidSweep, SweepInterrupted
from tuner_bridge.in_replica.scripts import Script
from tuner_bridge.optuna.objective_template import bounded, template_of
from tuner_bridge.optuna.optimize import OwnSlots, driver_of, scheduler_for
from tuner_bridge.optuna.trial_driver import OptunaDriver
from tuner_bridge.trackers.base import Tracker


def elastic(
    objective: Callable[[Any], Any] | Script,
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
    fresh_processes: bool = False,
    trackers: Sequence[Tracker] = (),
) -> ElasticObjective:
    """Return the objective whose trials are elastic jobs: ``study.optimize(elastic(train), n_trials=64, n_jobs=8)``.

    The scheduler starts with the first trial and ends with the process, or with the block of ``with elastic(train) as
    objective:``. Everything around the trials is Optuna's: a sweep that is killed is not resumed, and Ctrl-C waits for
    running trials where ``n_jobs`` is not 1; ``optimize`` does better in both.

    Args:
        objective: The objective, or a script.
        min_replicas: As for ``optimize``, as are all further arguments.
        max_replicas: Most replicas of a trial.
        slots_per_replica: Slots of each replica, or the numbers that it may have.
        slots: Slots of the scheduler that is started.
        emulate: Devices to emulate.
        memory_per_slot: Memory of a slot in GiB.
        gpus_per_slot: GPUs of a slot.
        state_dir: Folder of the scheduler.
        terms: Share, priority and goal of the study.
        promise_metric: Metric by which trials are judged, and its direction.
        fresh_processes: Start each replica in a process of its own.
        trackers: Trackers that hear of each trial.

    Raises:
        InvalidSweep: The objective cannot be run; as for ``optimize``.
    """
    template = template_of(
        objective, min_replicas, max_replicas, promise_metric, fresh_processes, slots_per_replica=slots_per_replica
    )
    own = OwnSlots(slots=slots, emulate=emulate, memory_per_slot=memory_per_slot, gpus_per_slot=gpus_per_slot)
    return ElasticObjective(template, max_replicas, own, state_dir, terms, promise_metric, trackers)


@dataclass(eq=False, repr=False)
class ElasticObjective:
    """Called by Optuna with each trial, from as many threads as it likes; serves one study."""

    _template: Any
    _max_replicas: int | None
    _own: OwnSlots
    _state_dir: str | os.PathLike[str] | None
    _terms: StudyTerms | None
    _promise_metric: tuple[str, str] | None
    _trackers: Sequence[Tracker]

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        self._driver: OptunaDriver | None = None
        self._open = contextlib.ExitStack()

    def __call__(self, trial: optuna.Trial) -> Any:
        driver = self._driver_for(trial.study)
        try:
            return driver.run(trial)
        except SweepInterrupted:
            if driver.fatal is not None:
                raise driver.fatal from None
            assert driver.spent
            trial.study.stop()
            raise optuna.TrialPruned("the study's budget of slot-hours is used up") from None

    def _driver_for(self, study: optuna.Study) -> OptunaDriver:
        with self._lock:
            if self._driver is None:
                self._driver = self._start(study)
            if self._driver.study.study_name != study.study_name:
                raise InvalidSweep(
                    f"this elastic objective serves the study {self._driver.study.study_name!r}, but was given to "
                    f"{study.study_name!r}; make one for each study with elastic(...)"
                )
            return self._driver

    def _start(self, study: optuna.Study) -> OptunaDriver:
        atexit.register(self.close)
        with contextlib.ExitStack() as starting:
            client, embedded = starting.enter_context(
                scheduler_for(
                    study.study_name,
                    self._own,
                    self._state_dir,
                    preload=self._template.preload,
                )
            )
            driver = driver_of(study, self._template, client, embedded, self._promise_metric, self._trackers)
            driver.attach(None if self._terms is None else self._terms.to_json())
            starting.callback(driver.detach)
            driver.say_if_emulated()
            driver.template = bounded(self._template, driver.slots, self._max_replicas)
            self._open = starting.pop_all()
        return driver

    def close(self) -> None:
        """Let go of the scheduler; the next trial would start another one."""
        with self._lock:
            self._driver = None
            self._open.close()
        atexit.unregister(self.close)

    def __enter__(self) -> ElasticObjective:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
