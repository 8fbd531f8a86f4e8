"""Order of samples: which belong to which replica's next batch, each exactly once a pass, at any world size.

A pass over the dataset is an order that depends on (seed, pass number) only: a permutation, what a sampler of the
user's draws, or that of a stream. A global batch is the slice ``[cursor, cursor + size)`` of it; replica i takes a
contiguous part. The cursor advances only when the optimizer step is complete on all replicas, so a rescale between two
steps, or a crash inside one, neither repeats nor skips a sample. Torch-free.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
    num_parts: int
    """Number of replicas that compute a part of this step."""


def split_evenly(count: int, parts: int) -> list[int]:
    """Return ``parts`` sizes that differ by at most one and sum to ``count``, larger ones first."""
    base, extra = divmod(count, parts)
    return [base + (index < extra) for index in range(parts)]


def divide(taken: Indices, *, rank: int, world_size: int, accumulation: int, least: int = 1) -> StepPlan:
    """Return the part of a global batch that falls to ``rank``, in ``accumulation + 1`` micro-batches.

    A replica that gets nothing (fewer samples than replicas) computes some all the same, with weight 0, because every
    replica has to take part in the reduction. ``least``: samples that a model needs to compute at all; no part is
    smaller unless the global batch is.
    """
    parts = max(1, min(world_size, len(taken) // least))
    sizes = split_evenly(len(taken), parts) + [0] * (world_size - parts)
    start = sum(sizes[:rank])
    share = taken[start : start + sizes[rank]]
    # As many passes on all replicas: those of one model in parts compute in turns.
    passes = min(accumulation + 1, max(1, min(size for size in sizes if size > 0) // least))
    if len(share) == 0:
        return StepPlan(micro_batches=(taken[:least],) * passes, global_batch=len(taken), weight=0.0, num_parts=parts)
    micro = np.split(share, np.cumsum(split_evenly(len(share), passes))[:-1])
    return StepPlan(
        micro_batches=tuple(micro),
        global_batch=len(taken),
        weight=len(share) / len(taken),
        num_parts=parts,
    )


class ElasticCursor:
    """Position within the current pass over ``num_samples`` samples.

    ``draw`` answers with the order of the pass of a given number, ``num_samples`` indices, the same whenever it is
    asked; None stands for the natural order or, with ``shuffle``, a permutation.
    """

    def __init__(
        self, num_samples: int, *, shuffle: bool, seed: int = 0, draw: Callable[[int], Indices] | None = None
    ) -> None:
        if num_samples < 1:
            raise InvalidTraining(f"the dataset has {num_samples} samples; it needs at least 1")
        self.num_samples = num_samples
        self.shuffle = shuffle
        self.seed = seed
        self.passes = 0
        self.position = 0
        self.left = False
        """True if the loop over the present pass was left before its end: the next loop begins a new pass."""
        self._draw = draw
        self._order: tuple[int, Indices] | None = None

    def begin_loop(self) -> None:
        if self.left and self.position:
            self.end_pass()
        self.left = False

    def ahead(self) -> ElasticCursor:
        """Return a copy to plan with, which may run ahead of this one."""
        copy = ElasticCursor(self.num_samples, shuffle=self.shuffle, seed=self.seed, draw=self._draw)
        copy.passes, copy.position, copy._order = self.passes, self.position, self._order
        return copy

    @property
    def remaining(self) -> int:
        """Samples left in this pass; never 0, a finished pass starts the next."""
        return self.num_samples - self.position

    def order(self) -> Indices:
        """Return the order of the current pass; O(num_samples) once a pass."""
        if self._order is None or self._order[0] != self.passes:
            if self._draw is not None:
                order = self._draw(self.passes)
            elif self.shuffle:
                generator = np.random.Generator(np.random.Philox(key=[self.seed, self.passes]))
                order = generator.permutation(self.num_samples)
            else:
                order = np.arange(self.num_samples)
            if len(order) != self.num_samples:
                raise InvalidTraining(
                    f"pass {self.passes} over the data has {len(order)} samples but the first pass had "
                    f"{self.num_samples}; the length of a dataset or sampler must not change"
                )
            self._order = (self.passes, order)
        return self._order[1]

    def take(self, batch: int, *, avoid_small_rest: bool) -> int:
        """Take the next global batch and return its size when ``batch`` samples are wanted.

        The pass ends with whatever is left. ``avoid_small_rest`` halves the last two batches instead of leaving
        less than half a batch, whose gradient would be noise and whose batch statistics may be undefined.
        """
        if self.remaining <= batch:
            return self.remaining
        if avoid_small_rest and self.remaining < 1.5 * batch:
            return -(-self.remaining // 2)
        return batch

    def plan(self, take: int, *, rank: int, world_size: int, accumulation: int, least: int = 1) -> StepPlan:
        """Return the part of the next ``take`` samples that falls to ``rank``; see divide."""
        taken = self.order()[self.position : self.position + take]
        return divide(taken, rank=rank, world_size=world_size, accumulation=accumulation, least=least)

    def commit(self, taken: int) -> bool:
        """Count the step over ``taken`` samples; return True when it ended the pass."""
        self.position += taken
        if self.position < self.num_samples:
            return False
        self.end_pass()
        return True

    def end_pass(self) -> None:
        self.passes += 1
        self.position = 0
        self.left = False

    def state_dict(self) -> dict[str, int]:
        return {
            "passes": self.passes,
            "position": self.position,
            "left": self.left,
            "seed": self.seed,
            "num_samples": self.num_samples,
        }

    def load_state_dict(self, state: dict[str, int]) -> None:
        if state["num_samples"] != self.num_samples:
            raise InvalidTraining(
                f"the checkpoint was made on a dataset of {state['num_samples']} samples, this one has "
                f"{self.num_samples}; train on the same data, or start a new trial"
            )
        self.passes, self.position, self.seed = state["passes"], state["position"], state["seed"]
        self.left = bool(state["left"])
        self._order = None


class StreamCursor:
    """Position within the current pass over a stream, whose end is known only when it is reached."""

    def __init__(self) -> None:
        self.passes = 0
        self.position = 0
        self.left = False

    def begin_loop(self) -> None:
        if self.left and self.position:
            self.end_pass()
        self.left = False

    def commit(self, taken: int) -> None:
        self.position += taken

    def end_pass(self) -> None:
        self.passes += 1
        self.position = 0
        self.left = False

    def state_dict(self) -> dict[str, int]:
        return {"passes": self.passes, "position": self.position, "left": self.left}

    def load_state_dict(self, state: dict[str, int]) -> None:
        if "positions" in state:
            raise InvalidTraining(
                "the trial has read the stream in parts, with several data workers per replica, but num_workers is "
                "0 or 1 here; use as many data workers as before, and at least 2 on every replica"
            )
        self.passes, self.position, self.left = state["passes"], state["position"], bool(state["left"])


def evaluation_share(num_samples: int, *, rank: int, world_size: int, batch: int) -> Sequence[int]:
    """Return the contiguous share of ``rank`` in one evaluation pass; shares are disjoint and cover every sample.

    Where there is a batch for every replica, shares consist of whole batches: some evaluations rank the samples of a
    batch against each other.
    """
    num_batches = -(-num_samples // batch)
    unit = batch if num_batches >= world_size else 1
    sizes = split_evenly(-(-num_samples // unit), world_size)
    start = sum(sizes[:rank])
    return range(min(start * unit, num_samples), min((start + sizes[rank]) * unit, num_samples))
