"""``adaptdl.goodput``: its names and arguments over our goodput model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dist_core.goodput import (
    BatchBounds,
    GradientStatistics,
    Observation,
    ThroughputParams,
    choose_batches,
    efficiency,
    fit_throughput,
    throughput,
)


class PerfParams(NamedTuple):
    """Seconds, but for ``gamma``; the symbols are those of ``dist_core.goodput.throughput``."""

    alpha_c: float
    beta_c: float
    alpha_n: float
    beta_n: float
    alpha_r: float
    beta_r: float
    gamma: float


class GradParams(NamedTuple):
    """Squared norm and variance of the gradient at the initial batch size."""

    sqr: float
    var: float


class GoodputFunction:
    """Goodput of a configuration, in examples at the initial batch size per second."""

    def __init__(self, perf_params: Sequence[float], grad_params: Sequence[float], init_batch_size: int) -> None:
        self._throughput = ThroughputParams(*(float(value) for value in perf_params))
        self._statistics = GradientStatistics(*(float(value) for value in grad_params))
        self._init_batch = int(init_batch_size)

    def __call__(
        self, num_nodes: ArrayLike, num_replicas: ArrayLike, atomic_bsz: ArrayLike, accum_steps: ArrayLike
    ) -> Any:
        return self.evaluate(num_nodes, num_replicas, atomic_bsz, accum_steps)

    def evaluate(
        self, num_nodes: ArrayLike, num_replicas: ArrayLike, atomic_bsz: ArrayLike, accum_steps: ArrayLike
    ) -> Any:
        """Return the goodput (examples/s times efficiency); array arguments broadcast as in NumPy."""
        passes = np.asarray(accum_steps) + 1
        total = np.asarray(num_replicas) * np.asarray(atomic_bsz) * passes
        return self.throughput(num_nodes, num_replicas, atomic_bsz, accum_steps) * self.efficiency(total)

    def throughput(
        self, num_nodes: ArrayLike, num_replicas: ArrayLike, atomic_bsz: ArrayLike, accum_steps: ArrayLike
    ) -> Any:
        """Examples per second."""
        return throughput(self._throughput, num_nodes, num_replicas, atomic_bsz, accum_steps)

    def efficiency(self, batch_size: ArrayLike) -> Any:
        """Progress per example, 1 at the initial batch size."""
        return efficiency(self._statistics, np.asarray(batch_size) / self._init_batch)

    def optimize(
        self,
        num_nodes: ArrayLike,
        num_replicas: ArrayLike,
        max_batch_size: int | None = None,
        atomic_bsz_range: tuple[int | None, int | None] | None = None,
        accumulation: bool = False,
    ) -> tuple[Any, Any, Any]:
        """(goodput, atomic batch size, accumulation steps) of each allocation; goodput 0 where none is permitted.

        Plain numbers for plain numbers, else arrays of their common shape. Raises ValueError for impossible bounds.
        """
        lowest, highest = atomic_bsz_range or (None, None)
        largest = max(self._init_batch if max_batch_size is None else int(max_batch_size), lowest or 1)
        if largest < self._init_batch:
            raise ValueError(
                f"max_batch_size is {largest}; it must be at least the initial batch size, {self._init_batch}"
            )
        bounds = BatchBounds(
            init_batch=self._init_batch,
            max_batch=largest,
            min_atomic=lowest or 1,
            max_atomic=highest,
            accumulation=accumulation,
        )
        nodes, replicas = np.broadcast_arrays(np.asarray(num_nodes), np.asarray(num_replicas))
        if (nodes < 1).any() or (replicas < nodes).any():
            raise ValueError("an allocation must have at least one node, and at least one replica on each node")
        flat_nodes, flat_replicas = nodes.reshape(-1), replicas.reshape(-1)
        found = choose_batches(self._throughput, self._statistics, bounds, flat_nodes, flat_replicas)
        atomic = np.clip(found.atomic_batch, bounds.min_atomic, bounds.largest_atomic)
        steps = found.accumulation if accumulation else np.zeros_like(found.accumulation)
        halves = -(-atomic // 2)
        alone = (flat_replicas == 1) & (steps == 0) & (atomic > self._init_batch) & (halves >= bounds.min_atomic)
        # A replica that is alone and grows its batch takes two passes: AdaptDL measures its noise scale between them.
        atomic, steps = np.where(alone & accumulation, halves, atomic), np.where(alone & accumulation, 1, steps)
        goodput = self.evaluate(flat_nodes, flat_replicas, atomic, steps)
        # One example a replica more than the bound is what dividing evenly may take.
        total = flat_replicas * atomic * (steps + 1)
        permitted = (atomic >= bounds.min_atomic) & (total < largest + flat_replicas * (steps + 1))
        goodput = np.where(permitted, goodput, 0.0)
        if nodes.ndim == 0:
            return float(goodput[0]), int(atomic[0]), int(steps[0])
        return goodput.reshape(nodes.shape), atomic.reshape(nodes.shape), steps.reshape(nodes.shape)


def fit_perf_params(
    nodes: ArrayLike,
    replicas: ArrayLike,
    local_bsz: ArrayLike,
    accumulation_steps: ArrayLike,
    step_time: ArrayLike,
    step_time_compute: ArrayLike,
    accumulation_time: ArrayLike,
) -> PerfParams:
    """Return the model that explains measured steps, one an entry of the arrays, best.

    ``step_time``: seconds of the pass that reduces and applies gradients. ``step_time_compute`` and
    ``accumulation_time``: seconds of one that does not; a step with accumulation tells of that by the latter. Raises
    ValueError for a configuration or a time that cannot be.
    """
    columns: list[NDArray[Any]] = [
        np.atleast_1d(np.asarray(column))
        for column in (nodes, replicas, local_bsz, accumulation_steps, step_time, step_time_compute, accumulation_time)
    ]
    observations = [
        Observation.from_row(
            [int(n), int(k), int(m), float((compute + accumulated) / 2 if steps else compute), float(whole), 1]
        )
        for n, k, m, steps, whole, compute, accumulated in zip(*columns, strict=True)
    ]
    params = fit_throughput(observations)
    if params is None:
        raise ValueError("there are no measured steps to fit a model to")
    return PerfParams(*astuple(params))


__all__ = ["GoodputFunction", "GradParams", "PerfParams", "fit_perf_params"]
