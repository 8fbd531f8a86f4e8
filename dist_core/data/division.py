"""Division of global batches into passes: the messages between a loader and its source."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from dist_core.data.order import StepPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class Division:
    """Rules for cutting global batches until something changes."""

    rank: int
    world_size: int
    global_batch: int
    accumulation: int
    first_step: int
    """Number of the next optimizer step."""
    measures: Callable[[int], bool]
    """Return whether the step of that number measures the noise scale."""
    splits_measured: bool
    """Measured steps take two passes, because one replica compares the halves of its batch."""
    splits_first: bool
    """The trial's first step takes several passes; otherwise it is whole, and shows how the loop trains."""
    varies: bool
    """Batches may differ in size, so that no pass ends with a sliver."""
    drop_last: bool
    """Leave out the rest of a pass that is smaller than a batch."""
    stream_workers: int
    """Parts of a stream for each replica when a pass over it begins; the same on all."""
    note_round: Callable[[], None]
    """The replicas have agreed on something that is no step."""
    least: int
    """Samples that a pass has at least, where the global batch has as many."""
    agree: Callable[[Sequence[float]], list[float] | None]
    """Collective, between two steps: sums over the replicas; None if one was lost, and another division applies."""

    def passes(self, step: int) -> int:
        """Accumulation steps of the step of that number."""
        if step == 0 and not self.splits_first:
            return 0
        if self.accumulation == 0 and self.splits_measured and self.measures(step):
            return 1
        return self.accumulation


@dataclass(frozen=True, slots=True)
class LoadedStep:
    plan: StepPlan
    batches: list[Any]
    measures: bool
