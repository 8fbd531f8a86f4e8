"""Chooses among ways to reduce by timing each for a few steps early on: a count of steps in, an index out.

Every replica counts the same steps and so tries the same candidate at the same time; rank 0's times decide, and its
choice is announced through the control reduction. Rounds are interleaved, because a shared machine is not equally
busy all the time, and the first candidate (torch's own way) stays unless another one is clearly faster.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import Any

from dist_core.gradients.reduce.contract import ReductionStrategy

ROUNDS = 3
SKIPPED_STEPS = 3
"""Of each turn: the first steps with new buckets lay them out anew."""
TIMED_STEPS = 6
CLEARLY_FASTER = 0.98


@dataclass(frozen=True, slots=True)
class Candidate:
    strategy: ReductionStrategy
    cap_mb: float | None
    """Bucket size; None leaves it as the user or torch set it."""


class Tuner:
    def __init__(self, num_candidates: int) -> None:
        self._num_candidates = num_candidates
        self._kept: dict[str, int] = {}
        self._key = ""
        self._restart()

    def _restart(self) -> None:
        self._turn = self._steps = 0
        self._times: list[list[float]] = [[] for _ in range(self._num_candidates)]

    def enter(self, world_size: int, num_nodes: int) -> None:
        """A generation of this size begins; what was found for the same size before holds."""
        self._key = f"{num_nodes}x{world_size}"
        self._restart()

    @property
    def settled(self) -> bool:
        return self._num_candidates == 1 or self._key in self._kept

    @property
    def candidate(self) -> int:
        """Index of the one to use now."""
        if self.settled:
            return self._kept.get(self._key, 0)
        return 0 if self._finished else self._turn % self._num_candidates

    @property
    def _finished(self) -> bool:
        return self._turn >= ROUNDS * self._num_candidates

    def timed(self, seconds: float) -> None:
        """A step with the present candidate took this long."""
        if not self._finished and self._steps >= SKIPPED_STEPS:
            self._times[self.candidate].append(seconds)

    def advance(self) -> None:
        """A step is over on all replicas."""
        self._steps += 1
        if not self._finished and self._steps >= SKIPPED_STEPS + TIMED_STEPS:
            self._turn, self._steps = self._turn + 1, 0

    @property
    def proposal(self) -> int | None:
        """The candidate to keep, once all have been timed."""
        if self.settled or not self._finished:
            return None
        medians = [statistics.median(times) if times else float("inf") for times in self._times]
        best = min(range(self._num_candidates), key=medians.__getitem__)
        return best if medians[best] < CLEARLY_FASTER * medians[0] else 0

    def settle(self, index: int) -> None:
        self._kept[self._key] = index

    def state_dict(self) -> dict[str, Any]:
        return dict(self._kept)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        # Made with another choice of candidates, an index would mean something else.
        self._kept = {key: index for key, index in state.items() if index < self._num_candidates}
