"""The best (atomic batch size, accumulation steps) for an allocation: goodput maximised within the user's bounds.

Goodput is throughput times statistical efficiency (Pollux, OSDI'21, eq. 6). The search runs over a geometric grid of
atomic batch sizes with the integers around the best one added, for every accumulation count that the largest batch
size allows; it is vectorised over allocations.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dist_core.goodput.efficiency import GradientStatistics, efficiency
from dist_core.goodput.throughput import ThroughputParams, throughput

GRID_POINTS = 40
MOST_ACCUMULATION = 15


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchBounds:
    """What the user allows. ``max_batch == init_batch`` means that the batch size is fixed."""

    init_batch: int
    """Global batch size at which the learning rate was chosen; progress is measured in its units."""
    max_batch: int
    min_atomic: int = 1
    max_atomic: int | None = None
    accumulation: bool = True

    def __post_init__(self) -> None:
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
        """Beyond this many replicas some would get less than the lower local bound."""
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


def choose_batches(
    params: ThroughputParams,
    statistics: GradientStatistics,
    bounds: BatchBounds,
    num_nodes: ArrayLike,
    num_replicas: ArrayLike,
) -> list[BatchChoice]:
    """The best batch for each allocation; ``num_nodes`` and ``num_replicas`` are arrays of shape (A,).

    An allocation that cannot be given a batch within the bounds (more replicas than examples) gets the smallest
    possible one, with the goodput that follows from it.
    """
    nodes = np.atleast_1d(np.asarray(num_nodes, dtype=int))
    replicas = np.atleast_1d(np.asarray(num_replicas, dtype=int))
    if not bounds.adaptive:
        pairs = np.array([fixed_choice(bounds, int(count)) for count in replicas])
        goodputs = _goodput(params, statistics, bounds, nodes, replicas, pairs[:, 0], pairs[:, 1])
        # A fixed batch does not grow with the ceiling in the split: its efficiency is 1 by definition.
        return [_choice(pair[0], pair[1], value) for pair, value in zip(pairs, goodputs, strict=True)]
    smallest = np.maximum(bounds.min_atomic, 1)
    largest = max(smallest, min(bounds.largest_atomic, bounds.max_batch))
    grid = np.unique(np.round(np.geomspace(smallest, largest, GRID_POINTS)).astype(int))
    most = min(MOST_ACCUMULATION, max(0, bounds.max_batch // int(smallest) - 1)) if bounds.accumulation else 0
    steps = np.arange(most + 1)
    best_atomic, best_steps, _ = _search(params, statistics, bounds, nodes, replicas, grid, steps)
    around = best_atomic[:, None] + np.arange(-3, 4)[None, :]
    local_steps = np.clip(best_steps[:, None] + np.arange(-1, 2)[None, :], 0, most)
    chosen: list[BatchChoice] = []
    for index in range(len(replicas)):
        candidates = np.unique(np.clip(around[index], smallest, largest))
        exact = bounds.max_batch // (replicas[index] * (local_steps[index] + 1))
        candidates = np.unique(np.concatenate([candidates, np.clip(exact, smallest, largest)]))
        atomic, accumulation, value = _search(
            params,
            statistics,
            bounds,
            nodes[index : index + 1],
            replicas[index : index + 1],
            candidates,
            np.unique(local_steps[index]),
        )
        chosen.append(_choice(atomic[0], accumulation[0], value[0]))
    return chosen


def _choice(atomic: int, accumulation: int, goodput: float) -> BatchChoice:
    return BatchChoice(atomic_batch=int(atomic), accumulation=int(accumulation), goodput=float(goodput))


def _search(
    params: ThroughputParams,
    statistics: GradientStatistics,
    bounds: BatchBounds,
    nodes: NDArray[np.int_],
    replicas: NDArray[np.int_],
    atomics: NDArray[np.int_],
    steps: NDArray[np.int_],
) -> tuple[NDArray[np.int_], NDArray[np.int_], NDArray[np.float64]]:
    """Arg max over the (allocation, atomic, accumulation) lattice; shapes (A,), (A,), (A,)."""
    atomic, step = (axis.ravel() for axis in np.meshgrid(atomics, steps, indexing="ij"))
    total = replicas[:, None] * atomic[None, :] * (step[None, :] + 1)
    value = _goodput(params, statistics, bounds, nodes[:, None], replicas[:, None], atomic[None, :], step[None, :])
    # Within the largest batch; and not below the initial one, where the learning rate is not valid.
    allowed = (total <= bounds.max_batch) & (total >= bounds.init_batch)
    scored = np.where(allowed, value, -1.0)
    # Nothing allowed: the batch closest to the permitted range, so that every allocation has an answer.
    distance = np.maximum(total - bounds.max_batch, 0) + np.maximum(bounds.init_batch - total, 0)
    nearest = np.argmin(distance, axis=1)
    winner = np.where(allowed.any(axis=1), np.argmax(scored, axis=1), nearest)
    rows = np.arange(len(replicas))
    return atomic[winner], step[winner], value[rows, winner]


def _goodput(
    params: ThroughputParams,
    statistics: GradientStatistics,
    bounds: BatchBounds,
    nodes: NDArray[np.int_],
    replicas: NDArray[np.int_],
    atomic: NDArray[np.int_],
    accumulation: NDArray[np.int_],
) -> NDArray[np.float64]:
    speed = throughput(params, nodes, replicas, atomic, accumulation)
    scale = replicas * atomic * (accumulation + 1) / bounds.init_batch
    return np.asarray(speed * efficiency(statistics, np.maximum(scale, 1.0)))
