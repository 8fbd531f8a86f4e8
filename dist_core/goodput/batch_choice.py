"""The best (atomic batch size, accumulation steps) for an allocation: goodput maximised within the user's bounds.

Goodput is throughput times statistical efficiency (Pollux, OSDI'21, eq. 6). For a given local batch the fewest passes
are the best: each further one costs its fixed time once more and leaves less computation to hide the reduction behind.
So the search is over one number, the local batch. Within a count of passes goodput has one peak (a concave gain over a
convex time), and the ends of those stretches, multiples of the largest atomic batch, are looked at by themselves. A
geometric grid finds the neighbourhood and two rounds close in on it, for all allocations at once. At last a few more
passes are tried, because small batches do not divide evenly into the fewest.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dist_core.goodput.efficiency import GradientStatistics, gain
from dist_core.goodput.throughput import SMALLEST_SECONDS, ThroughputParams, gradient_seconds, sync_seconds

Integers = NDArray[np.int64]
Floats = NDArray[np.float64]

GRID_POINTS = 14
CLOSER_POINTS = 6
CLOSER_ROUNDS = 2
MORE_PASSES = 5
SMALL_LOCAL = 64
SMALL_ATOMIC = 256
MOST_ACCUMULATION = 15


LARGEST_BATCH = 2**31


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchBounds:
    """Bounds that the user sets. ``max_batch == init_batch`` fixes the batch size."""

    init_batch: int
    """Global batch size at which the learning rate was chosen; progress is measured in its units."""
    max_batch: int
    min_atomic: int = 1
    max_atomic: int | None = None
    accumulation: bool = True

    def __post_init__(self) -> None:
        if self.max_batch > LARGEST_BATCH:
            raise ValueError(f"max_batch_size is {self.max_batch}; it must be at most {LARGEST_BATCH}")
        for bound in (self.min_atomic, self.max_atomic or 1):
            if bound > LARGEST_BATCH:
                raise ValueError(f"a local batch bound is {bound}; it must be at most {LARGEST_BATCH}")
        if self.init_batch < 1:
            raise ValueError(f"batch_size is {self.init_batch}; it must be at least 1")
        if self.max_batch < self.init_batch:
            raise ValueError(
                f"max_batch_size is {self.max_batch} but batch_size is {self.init_batch}; "
                "max_batch_size must be at least batch_size"
            )
        if self.min_atomic < 1:
            raise ValueError(f"the lower local batch bound is {self.min_atomic}; it must be at least 1")
        if self.max_atomic is not None and self.max_atomic < self.min_atomic:
            raise ValueError(
                f"local batch bounds are ({self.min_atomic}, {self.max_atomic}); the lower must not exceed the upper"
            )

    @property
    def adaptive(self) -> bool:
        return self.max_batch > self.init_batch

    @property
    def largest_atomic(self) -> int:
        return self.max_batch if self.max_atomic is None else self.max_atomic

    def max_useful_replicas(self) -> int:
        """Return the largest number of replicas at which each still gets the minimum local batch size."""
        return max(1, self.max_batch // self.min_atomic)


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchChoice:
    """The winner for one allocation."""

    atomic_batch: int
    accumulation: int
    goodput: float
    """Examples at the initial batch size per second."""

    def global_batch(self, num_replicas: int) -> int:
        return self.atomic_batch * (self.accumulation + 1) * num_replicas


def fixed_choice(bounds: BatchBounds, num_replicas: int) -> tuple[int, int]:
    """(atomic batch, accumulation) that splits the initial batch size over the replicas."""
    local = -(-bounds.init_batch // num_replicas)
    accumulation = -(-local // bounds.largest_atomic) - 1
    return -(-local // (accumulation + 1)), accumulation


@dataclass(frozen=True, slots=True)
class BatchChoices:
    """The best batch for each of A allocations, as arrays of shape (A,)."""

    atomic_batch: Integers
    accumulation: Integers
    goodput: Floats


def choose_batches(
    params: ThroughputParams,
    statistics: GradientStatistics,
    bounds: BatchBounds,
    num_nodes: ArrayLike,
    num_replicas: ArrayLike,
) -> BatchChoices:
    """Return the best batch for each allocation; ``num_nodes`` and ``num_replicas`` are arrays of shape (A,).

    An allocation that cannot be given a batch within the bounds (more replicas than examples) gets the one closest to
    them, with the goodput that follows from it.
    """
    nodes = np.atleast_1d(np.asarray(num_nodes, dtype=np.int64))
    replicas = np.atleast_1d(np.asarray(num_replicas, dtype=np.int64))
    # Only the number of replicas and whether they share a node matter: allocations repeat.
    keys, where = np.unique(2 * replicas + (nodes > 1), return_inverse=True)
    lattice = _Lattice(params, statistics, bounds, 1 + keys % 2, keys // 2)
    if bounds.adaptive:
        atomic, accumulation, value = lattice.search()
    else:
        # A fixed batch does not grow with the ceiling in the split: its efficiency is 1 by definition.
        atomic, accumulation = lattice.divide(-(-bounds.init_batch // lattice.replicas))
        value = lattice.goodput(atomic[:, None], accumulation[:, None])[:, 0]
    return BatchChoices(atomic[where], accumulation[where], value[where])


def choose_batch(
    params: ThroughputParams,
    statistics: GradientStatistics,
    bounds: BatchBounds,
    num_nodes: int,
    num_replicas: int,
) -> BatchChoice:
    """Return the best batch for one allocation; see choose_batches."""
    choice = choose_batches(params, statistics, bounds, num_nodes, num_replicas)
    return BatchChoice(
        atomic_batch=int(choice.atomic_batch[0]),
        accumulation=int(choice.accumulation[0]),
        goodput=float(choice.goodput[0]),
    )


class _Lattice:
    """Goodput of local batches for distinct allocations, shape (A,); local batches have shape (A, points)."""

    def __init__(
        self,
        params: ThroughputParams,
        statistics: GradientStatistics,
        bounds: BatchBounds,
        nodes: Integers,
        replicas: Integers,
    ) -> None:
        self.params, self.statistics, self.bounds = params, statistics, bounds
        self.replicas = replicas
        self.sync = sync_seconds(params, nodes, replicas) ** params.gamma
        self.smallest = bounds.min_atomic
        self.largest = max(self.smallest, min(bounds.largest_atomic, bounds.max_batch))
        self.passes = 1 + (MOST_ACCUMULATION if bounds.accumulation or not bounds.adaptive else 0)

    def divide(self, local: Integers) -> tuple[Integers, Integers]:
        """(atomic batch, accumulation) with the fewest passes; at least ``local`` examples where it does not divide."""
        passes = np.maximum(1, -(-local // self.largest))
        return -(-local // passes), passes - 1

    def goodput(self, atomic: Integers, accumulation: Integers) -> Floats:
        gradient = np.maximum(gradient_seconds(self.params, atomic), SMALLEST_SECONDS)
        power = gradient**self.params.gamma
        power += self.sync[:, None]
        seconds = power ** (1.0 / self.params.gamma)
        seconds += accumulation * gradient
        total = self.replicas[:, None] * atomic * (accumulation + 1)
        scale = np.maximum(total / self.bounds.init_batch, 1.0)
        # throughput x efficiency = total / seconds x gain / scale
        if self.bounds.adaptive:
            total = total * np.minimum(gain(self.statistics, scale) / scale, 1.0)
        return np.asarray(total / seconds)

    def search(self) -> tuple[Integers, Integers, Floats]:
        low = np.maximum(self.smallest, -(-self.bounds.init_batch // self.replicas))
        high = np.minimum(self.largest * self.passes, self.bounds.max_batch // self.replicas)
        impossible = high < low
        low, high = np.where(impossible, self._closest(), low), np.where(impossible, self._closest(), high)
        steps = np.linspace(0.0, 1.0, GRID_POINTS)
        ratio = high / low
        grid = np.rint(low[:, None] * ratio[:, None] ** steps).astype(np.int64)
        ends = self.largest * np.arange(1, min(self.passes, int(high.max()) // self.largest + 1))
        if len(ends):
            grid = np.concatenate([grid, np.clip(ends[None, :], low[:, None], high[:, None])], axis=1)
        best, value = self._best(grid, low, high)
        reach = ratio ** (1.0 / (GRID_POINTS - 1))
        for _ in range(CLOSER_ROUNDS):
            around = np.linspace(-1.0, 1.0, CLOSER_POINTS + 2)[1:-1]
            grid = np.rint(best[:, None] * reach[:, None] ** around).astype(np.int64)
            grid = np.clip(grid, low[:, None], high[:, None])
            closer, closer_value = self._best(grid, low, high)
            best = np.where(closer_value > value, closer, best)
            value = np.maximum(closer_value, value)
            reach = reach ** (2.0 / (CLOSER_POINTS + 1))
        return self._in_passes(best, low, high)

    def _in_passes(self, local: Integers, low: Integers, high: Integers) -> tuple[Integers, Integers, Floats]:
        """Return the best division of this local batch or of one next to it: few numbers divide evenly."""
        rows = np.arange(len(local))
        # Where atomic batches are small, any count of passes may be the one that divides; else rounding is below 0.4%.
        further = MORE_PASSES if self.largest >= SMALL_ATOMIC else self.passes
        best: tuple[Integers, Integers, Floats] | None = None
        for offset in (0, 1, -1) if int(local.min()) < SMALL_LOCAL else (0,):
            wanted = np.clip(local + offset, low, high)
            fewest = self.divide(wanted)[1] + 1
            more = np.minimum(fewest[:, None] + np.arange(further), self.passes)
            passes = np.concatenate([more, more], axis=1)
            atomic = np.concatenate([-(-wanted[:, None] // more), wanted[:, None] // more], axis=1)
            atomic = np.clip(atomic, self.smallest, self.largest)
            value = self.goodput(atomic, passes - 1)
            value[(atomic * passes > high[:, None]) | (atomic * passes < low[:, None])] *= -1.0
            winner = np.argmax(value, axis=1)
            candidate = atomic[rows, winner], passes[rows, winner] - 1, value[rows, winner]
            if best is None:
                best = candidate
            else:
                better = candidate[2] > best[2]
                best = (
                    np.where(better, candidate[0], best[0]),
                    np.where(better, candidate[1], best[1]),
                    np.where(better, candidate[2], best[2]),
                )
        assert best is not None
        # Negative where nothing was permitted and the closest is the answer.
        return best[0], best[1], np.abs(best[2])

    def _closest(self) -> Integers:
        """Return the local batch whose total comes closest to the permitted ones, where none is permitted."""
        under = np.clip(self.bounds.max_batch // self.replicas, self.smallest, self.largest * self.passes)
        over = np.clip(-(-self.bounds.init_batch // self.replicas), self.smallest, self.largest * self.passes)
        return np.where(self._distance(under) <= self._distance(over), under, over)

    def _distance(self, local: Integers) -> Integers:
        total = local * self.replicas
        outside: Integers = np.maximum(total - self.bounds.max_batch, 0) + np.maximum(self.bounds.init_batch - total, 0)
        return outside

    def _best(self, grid: Integers, low: Integers, high: Integers) -> tuple[Integers, Floats]:
        """Arg max along the points. Division into passes rounds up, or down where up is out of bounds."""
        atomic, accumulation = self.divide(grid)
        atomic = np.minimum(atomic, np.maximum(high[:, None] // (accumulation + 1), 1))
        value = self.goodput(atomic, accumulation)
        outside = (atomic * (accumulation + 1) < low[:, None]) | (atomic < self.smallest)
        value[outside & (grid != low[:, None])] = -1.0
        rows = np.arange(len(grid))
        winner = np.argmax(value, axis=1)
        # What the point came to when it was divided, which other points may have come to as well.
        return (atomic * (accumulation + 1))[rows, winner], value[rows, winner]
