"""Which samples belong to which replica's next batch: every sample exactly once a pass, at any world size.

A pass over the dataset is a permutation that depends on (seed, pass number) only. A global batch is the slice
``[cursor, cursor + size)`` of it; replica i takes a contiguous part. The cursor advances only when the optimizer step
is complete on all replicas, so a rescale between two steps, or a crash inside one, neither repeats nor skips a sample.
Torch-free.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dist_core.errors import InvalidTraining

Indices = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """One optimizer step of one replica."""

    micro_batches: tuple[Indices, ...]
    """Sample indices of each forward and backward pass, ``accumulation + 1`` of them."""
    global_batch: int
    """Examples over all replicas: what the cursor advances by."""
    weight: float
    """This replica's share of the global batch; weighted gradients sum to the exact mean. 0 for a padded replica."""

    @property
    def local_batch(self) -> int:
        return sum(len(indices) for indices in self.micro_batches)


def split_evenly(count: int, parts: int) -> list[int]:
    """``parts`` sizes that differ by at most one and sum to ``count``, larger ones first."""
    base, extra = divmod(count, parts)
    return [base + (index < extra) for index in range(parts)]


class ElasticCursor:
    """Position within the current pass over ``num_samples`` samples."""

    def __init__(self, num_samples: int, *, shuffle: bool, seed: int = 0) -> None:
        if num_samples < 1:
            raise InvalidTraining(f"the dataset has {num_samples} samples; it needs at least 1")
        self.num_samples = num_samples
        self.shuffle = shuffle
        self.seed = seed
        self.passes = 0
        self.position = 0
        self._order: tuple[int, Indices] | None = None

    @property
    def remaining(self) -> int:
        """Samples left in this pass; never 0, a finished pass starts the next."""
        return self.num_samples - self.position

    def order(self) -> Indices:
        """The permutation of the current pass; O(num_samples) once a pass."""
        if self._order is None or self._order[0] != self.passes:
            if self.shuffle:
                generator = np.random.Generator(np.random.Philox(key=[self.seed, self.passes]))
                order = generator.permutation(self.num_samples)
            else:
                order = np.arange(self.num_samples)
            self._order = (self.passes, order)
        return self._order[1]

    def take(self, batch: int, *, avoid_small_rest: bool) -> int:
        """How many samples the next global batch gets when ``batch`` are wanted.

        The pass ends with whatever is left. ``avoid_small_rest`` halves the last two batches instead of leaving
        less than half a batch, whose gradient would be noise and whose batch statistics may be undefined.
        """
        if self.remaining <= batch:
            return self.remaining
        if avoid_small_rest and self.remaining < 1.5 * batch:
            return -(-self.remaining // 2)
        return batch

    def plan(self, take: int, *, rank: int, world_size: int, accumulation: int) -> StepPlan:
        """The part of the next ``take`` samples that falls to ``rank``, in ``accumulation + 1`` micro-batches.

        A replica that gets nothing (fewer samples than replicas) computes one sample with weight 0, because every
        replica has to take part in the reduction.
        """
        sizes = split_evenly(take, world_size)
        start = self.position + sum(sizes[:rank])
        mine = self.order()[start : start + sizes[rank]]
        if len(mine) == 0:
            padding = self.order()[self.position : self.position + 1]
            return StepPlan(micro_batches=(padding,) * (accumulation + 1), global_batch=take, weight=0.0)
        passes = min(accumulation + 1, min(size for size in sizes if size > 0))
        micro = np.split(mine, np.cumsum(split_evenly(len(mine), passes))[:-1])
        return StepPlan(micro_batches=tuple(micro), global_batch=take, weight=len(mine) / take)

    def commit(self, taken: int) -> bool:
        """The step over ``taken`` samples is done; True when it ended the pass."""
        self.position += taken
        if self.position < self.num_samples:
            return False
        self.passes += 1
        self.position = 0
        return True

    def state_dict(self) -> dict[str, int]:
        return {"passes": self.passes, "position": self.position, "seed": self.seed, "num_samples": self.num_samples}

    def load_state_dict(self, state: dict[str, int]) -> None:
        if state["num_samples"] != self.num_samples:
            raise InvalidTraining(
                f"the checkpoint was made on a dataset of {state['num_samples']} samples, this one has "
                f"{self.num_samples}; train on the same data, or start a new trial"
            )
        self.passes, self.position, self.seed = state["passes"], state["position"], state["seed"]


def evaluation_share(num_samples: int, *, rank: int, world_size: int) -> Sequence[int]:
    """The contiguous share of ``rank`` in one evaluation pass; shares are disjoint and cover every sample."""
    sizes = split_evenly(num_samples, world_size)
    start = sum(sizes[:rank])
    return range(start, start + sizes[rank])
