"""Order of samples: which belong to which replica's next batch, each exactly once a pass, at any world size.

A pass over the dataset is an order that depends on (seed, pass number) only: a permutation, what a sampler of the
user's draws, or that of a stream. A global batch is the slice ``[cursor, cursor + size)`` of it; replica i takes a
contiguous part. The cursor advances only when the optimizer step is complete on all replicas, so a rescale between two
steps, or a crash inside one, neither repeats nor skips a sample. Torch-free.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

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


class Cursor:
    """Position within the current pass over data of any kind."""

    def __init__(self) -> None:
        self.passes = 0
        self.position = 0
        self.left = False
        """True if the loop over the present pass was left before its end: the next loop begins a new pass."""

    def begin_loop(self) -> None:
        if self.left and self.position:
            self.end_pass()
        self.left = False

    def end_pass(self) -> None:
        self.passes += 1
        self.position = 0
        self.left = False

    def state_dict(self) -> dict[str, Any]:
        return {"passes": self.passes, "position": self.position, "left": self.left}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.passes, self.position, self.left = state["passes"], state["position"], bool(state["left"])


class ElasticCursor(Cursor):
    """Position within the current pass over ``num_samples`` samples.

    ``draw`` answers with the order of the pass of a given number, ``num_samples`` indices, the same whenever it is
    asked; None stands for the natural order or, with ``shuffle``, a permutation.
    """

    def __init__(
        self, num_samples: int, *, shuffle: bool, seed: int = 0, draw: Callable[[int], Indices] | None = None
    ) -> None:
        if num_samples < 1:
            raise InvalidTraining(f"the dataset has {num_samples} samples; it needs at least 1")
        super().__init__()
        self.num_samples = num_samples
        self.shuffle = shuffle
        self.seed = seed
        self._draw = draw
        self._order: tuple[int, Indices] | None = None

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

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "seed": self.seed, "num_samples": self.num_samples}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state["num_samples"] != self.num_samples:
            raise InvalidTraining(
                f"the trial has trained on a dataset of {state['num_samples']} samples, and this loader's has "
                f"{self.num_samples}; train on the same data in all epochs and runs, or start a new trial"
            )
        super().load_state_dict(state)
        self.seed = state["seed"]
        self._order = None


class StreamCursor(Cursor):
    """Position within the current pass over a stream, whose end is known only when it is reached."""

    def commit(self, taken: int) -> None:
        self.position += taken

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if "positions" in state:
            raise InvalidTraining(
                "the trial has read the stream in parts, with several data workers per replica, but num_workers is "
                "0 or 1 here; use as many data workers as before, and at least 2 on every replica"
            )
        super().load_state_dict(state)


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


class PartedCursor(Cursor):
    """Position within the current pass over a stream in parts."""

    def __init__(self) -> None:
        super().__init__()
        self.positions: list[int] = []
        """Samples of each part that count; no parts before the pass is divided."""
        self.ended: list[bool] = []
        self.owners: list[int] = []
        """The rank that reads each part."""
        self.world_size = 0
        """World size that the parts are divided for."""
        self.first_world_size = 0
        """World size when the pass began."""

    @property
    def num_parts(self) -> int:
        return len(self.positions)

    @property
    def is_over(self) -> bool:
        return all(self.ended)

    def divide(self, world_size: int, workers: int) -> None:
        """Give the parts to so many replicas; nothing changes when they are divided among as many.

        A pass that begins has ``workers`` parts for each.
        """
        if not self.positions:
            count = workers * world_size
            self.positions, self.ended = [0] * count, [False] * count
            self.first_world_size = world_size
        elif self.world_size == world_size:
            return
        self.world_size = world_size
        self.owners = [0] * self.num_parts
        for index, part in enumerate(self._read_on()):
            self.owners[part] = index % world_size

    def parts_of(self, rank: int) -> list[int]:
        """Return the parts that are left to read for a replica."""
        return [part for part in self._read_on() if self.owners[part] == rank]

    def advance(self, counts: Sequence[int], ended: Sequence[bool]) -> None:
        """Advance by the samples that a step took of each part, and end the parts that it found to end."""
        for part, count in enumerate(counts):
            self.positions[part] += count
            self.ended[part] |= bool(ended[part])
        self.position += sum(counts)
        self._share_out()

    def _share_out(self) -> None:
        """Give a replica at the end of its parts one from those that have the most left."""
        while True:
            left = [len(self.parts_of(rank)) for rank in range(self.world_size)]
            if min(left) > 0 or max(left) < 2:
                return
            part = self.parts_of(left.index(max(left)))[-1]
            self.owners[part] = left.index(0)

    def _read_on(self) -> list[int]:
        return [part for part, ended in enumerate(self.ended) if not ended]

    def end_pass(self) -> None:
        """End this pass without what is left of it; the next one is divided anew."""
        super().end_pass()
        self.world_size = self.first_world_size = 0
        self.positions, self.ended, self.owners = [], [], []

    def state_dict(self) -> dict[str, Any]:
        return {
            **super().state_dict(),
            "positions": list(self.positions),
            "ended": list(self.ended),
            "owners": list(self.owners),
            "world_size": self.world_size,
            "first_world_size": self.first_world_size,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if "positions" not in state:
            raise InvalidTraining(
                "the trial has read the stream as a whole, but num_workers is 2 or more here, so that each data "
                "worker would read a part of it; use num_workers=1 on all replicas"
            )
        super().load_state_dict(state)
        self.positions, self.ended = list(state["positions"]), list(state["ended"])
        self.owners, self.world_size = list(state["owners"]), state["world_size"]
        self.first_world_size = state["first_world_size"]
