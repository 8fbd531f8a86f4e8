"""Lets a policy see what no real scheduler can: true speeds and true remaining work, as some papers' baselines do."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from dist_core.goodput import BatchBounds
from scheduler.simulator.training import SimulatedTraining
from scheduler.snapshot import Grant, Policy, Snapshot

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class TrueSpeed:
    """True speed of a simulated job, in steps per second at the user's batch size, for policies that are told it."""

    training: SimulatedTraining
    kind: str = ""

    def on(self, kind: str) -> TrueSpeed:
        return TrueSpeed(self.training, kind)

    @property
    def bounds(self) -> BatchBounds:
        return self.training.bounds

    @property
    def most_profiled(self) -> int:
        return self.training.most_replicas * self.training.submission.share_size

    @property
    def most_useful(self) -> int:
        return self.bounds.max_useful_replicas() * self.training.submission.share_size

    def curve(self, node_slots: int, counts: NDArray[np.int64]) -> Floats:
        size = self.training.submission.share_size
        shares, fits = np.maximum(1, counts // size), max(1, node_slots // size)
        whole = np.array([1.0 / self._step_seconds(fits, int(count)) for count in shares])
        # A part of what computes a share is worth that part of it.
        return np.asarray(whole * np.minimum(1.0, counts / size))

    def _step_seconds(self, node_slots: int, count: int) -> float:
        whole, rest = divmod(count, node_slots)
        shape = (node_slots,) * whole + ((rest,) if rest else ())
        atomic, accumulation = self.training.fixed_choice(count)
        step, sync = self.training.application.step_seconds(shape, atomic)
        return step + accumulation * (step - sync)


class WithOracle:
    """A policy that is told the truth."""

    def __init__(self, policy: Policy, training_of: Callable[[str], SimulatedTraining]) -> None:
        self.name = policy.name
        self._policy = policy
        self._training_of = training_of

    def allocate(self, snapshot: Snapshot) -> dict[str, Grant]:
        views = []
        for view in snapshot.trials:
            training = self._training_of(view.trial_id)
            views.append(replace(view, model=TrueSpeed(training), remaining_progress=training.steps_left()))
        return self._policy.allocate(replace(snapshot, trials=tuple(views)))
