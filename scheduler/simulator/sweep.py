"""A sweep in virtual time: learning curves for what trials report, measured speeds for how fast they get there.

The tuner is asynchronous successive halving by stopping (ASHA, Li et al., MLSys'20): a trial that comes to a rung with
a value below the best third of those that came there before it is stopped. It keeps a number of trials submitted, as
`optimize` does; what the scheduler gives them decides how soon each comes to its rungs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush

import numpy as np
from numpy.typing import NDArray

from scheduler.knowledge.coming import Plans
from scheduler.simulator.application import Application
from scheduler.simulator.cluster import SimulationSettings
from scheduler.simulator.training import SimulatedTraining
from scheduler.simulator.workload import Submission
from scheduler.simulator.world import Told, World
from scheduler.snapshot import Policy
from trials.record import Outcome, Report, Study
from trials.terms import Goal, StudyTerms

Floats = NDArray[np.float64]
STUDY = "sweep"


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepSettings:
    min_replicas: int = 1
    max_replicas: int = 8
    slots_per_replica: int = 1
    at_a_time: int = 16
    """Trials that the tuner keeps submitted."""
    rungs: tuple[int, ...] = (2, 6, 17)
    """Reports after which a trial is stopped unless it is among the best ``1 / keep_one_in``; none: never."""
    keep_one_in: int = 3
    goal: Goal = "completion_time"
    deadline_seconds: float | None = None
    """Seconds until the best result is wanted, with the goal ``deadline``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepResult:
    policy: str
    makespan_seconds: float
    slot_hours: float
    best_value: float
    """Final value of the best trial that was trained to its end."""
    best_finished_seconds: float
    """Time of that trial's end."""
    finished: int
    rescales: int
    undone: int
    """Rescales that were taken back before they had paid for their pause."""
    incumbent: tuple[tuple[float, float], ...] = field(default=(), repr=False)
    """(seconds, best value reported so far), whenever it improved."""
    histories: Mapping[str, tuple[Told, ...]] = field(default_factory=dict, repr=False, compare=False)
    """Histories by number of the configuration."""

    def score_at(self, seconds: float) -> float:
        """Best value reported by then."""
        return max((value for at, value in self.incumbent if at <= seconds), default=float("-inf"))


class SuccessiveHalving:
    def __init__(self, rungs: Sequence[int], keep_one_in: int) -> None:
        self._values: dict[int, list[float]] = {rung: [] for rung in rungs}
        self._keep_one_in = keep_one_in

    def keeps(self, epoch: int, value: float) -> bool:
        """Tell whether a trial that reports this value after that epoch goes on."""
        seen = self._values.get(epoch)
        if seen is None:
            return True
        seen.append(value)
        return value >= float(np.quantile(seen, 1.0 - 1.0 / self._keep_one_in))


class SweepWorld(World):
    def __init__(
        self,
        curves: Floats,
        application: Application,
        policy: Policy,
        settings: SimulationSettings,
        sweep: SweepSettings,
    ) -> None:
        """``curves``: values that each configuration (row) reports, larger is better, at equal distances of its length.

        The application's epochs have to be a multiple of the reports.
        """
        super().__init__((), policy, replace(settings, request="elastic"))
        self._curves = curves
        self._sweep = sweep
        self._halving = SuccessiveHalving(sweep.rungs, sweep.keep_one_in)
        self._epochs_seen: dict[str, int] = {}
        self._finals: dict[str, tuple[float, float]] = {}
        self._incumbent: list[tuple[float, float]] = []
        self._places = [0.0] * sweep.at_a_time
        """Times at which the tuner can submit a trial, soonest first."""
        self._waiting = [
            Submission(
                name=str(index),
                at=0.0,
                application=application,
                num_replicas=1,
                batch_size=1,
                slots_per_replica=sweep.slots_per_replica,
            )
            for index in range(len(curves))
        ]
        terms = StudyTerms(goal=sweep.goal, deadline_at=sweep.deadline_seconds)
        self._put_study(Study(name=STUDY, direction="maximize", terms=terms))

    def sweep(self) -> SweepResult:
        result = self.run()
        best = max(self._finals.values(), default=(float("nan"), float("nan")))
        return SweepResult(
            policy=result.policy,
            makespan_seconds=result.makespan_seconds,
            slot_hours=sum(job.slot_seconds for job in result.jobs) / 3600.0,
            best_value=best[0],
            best_finished_seconds=best[1],
            finished=len(self._finals),
            rescales=sum(job.num_rescales for job in result.jobs),
            undone=sum(job.num_undone for job in result.jobs),
            histories=result.histories,
            incumbent=tuple(self._incumbent),
        )

    def _submit_due(self) -> None:
        while self._waiting and self._next_submission() <= self.now:
            heappop(self._places)
            self._submit(replace(self._waiting.pop(0), at=self.now))
            self.loop.decisions.note_plans(STUDY, Plans(self._sweep.at_a_time, len(self._waiting)))

    def _next_submission(self) -> float:
        return self._places[0] if self._waiting and self._places else math.inf

    def _end(self, trial_id: str, outcome: Outcome, at: float) -> None:
        super()._end(trial_id, outcome, at)
        heappush(self._places, at + self._timing.successor)

    def _study_of(self, submission: Submission) -> str:
        return STUDY

    def _replica_bounds(self, submission: Submission, training: SimulatedTraining) -> tuple[int, int]:
        return self._sweep.min_replicas, min(self._sweep.max_replicas, training.most_replicas)

    def _note_progress(self) -> None:
        for trial_id, training in list(self.trainings.items()):
            row = int(training.submission.name)
            ends = training.application.epoch_ends * training.application.bounds.init_batch
            seen = self._epochs_seen.get(trial_id, 0)
            stopped = False
            every = (len(ends) - 1) // self._curves.shape[1]
            for epoch in range(seen + 1, training.epoch // every + 1):
                value = float(self._curves[row, epoch - 1])
                self.store.add_report(Report(trial_id, epoch, value, float(ends[epoch * every])))
                self._epochs_seen[trial_id] = epoch
                if not self._incumbent or value > self._incumbent[-1][1]:
                    self._incumbent.append((self.now, value))
                if not self._halving.keeps(epoch, value):
                    stopped = True
                    break
            if stopped:
                self._end(trial_id, Outcome(kind="pruned", message="stopped at a rung"), self.now)
            elif training.finished_at is not None:
                self._finals[training.submission.name] = float(self._curves[row, -1]), training.finished_at
                self._end(trial_id, Outcome(kind="value", value=float(self._curves[row, -1])), training.finished_at)


def learning_curves(configurations: int, epochs: int, *, seed: int) -> Floats:
    """Values that rise as a power or an exponential of the epoch towards different ends, cross, and are noisy.

    Shape (configurations, epochs), between 0 and 1; one in ten diverges at some epoch. The ranks after a tenth of the
    epochs agree with the final ones about as well as in published collections of curves (rank correlation 0.8).
    """
    chance = np.random.default_rng(seed)
    at = np.arange(1, epochs + 1) / epochs
    start = chance.uniform(0.0, 0.2, configurations)[:, None]
    end = chance.beta(4.0, 2.0, configurations)[:, None]
    speed = chance.uniform(0.3, 1.0, configurations)[:, None]
    rate = chance.uniform(2.0, 12.0, configurations)[:, None]
    power = 1.0 - (1.0 + 20.0 * at) ** -speed
    exponential = 1.0 - np.exp(-rate * at)
    mix = chance.uniform(0.0, 1.0, configurations)[:, None]
    shape = mix * power / power[:, -1:] + (1.0 - mix) * exponential / exponential[:, -1:]
    values = start + (end - start) * shape + chance.normal(0.0, 0.01, (configurations, epochs))
    diverged = chance.random(configurations) < 0.1
    since = chance.integers(1, epochs, configurations)
    values[(np.arange(epochs) >= since[:, None]) & diverged[:, None]] *= 0.3
    return np.clip(values, 0.0, 1.0)
