"""Choosing batches for a thousand allocations, and how far the choice is from the exact integer optimum."""

from __future__ import annotations

import itertools
import statistics
import time

import numpy as np

from benchmarks.frame import Measurement
from dist_core.goodput import (
    BatchBounds,
    GradientStatistics,
    ThroughputParams,
    choose_batch,
    choose_batches,
    efficiency,
    throughput,
)

BOUNDS = BatchBounds(init_batch=128, max_batch=8192, min_atomic=8, max_atomic=512)


def exact(params: ThroughputParams, statistics_: GradientStatistics, replicas: int) -> float:
    atomic, steps = np.array(list(itertools.product(range(BOUNDS.min_atomic, BOUNDS.largest_atomic + 1), range(16)))).T
    total = atomic * (steps + 1) * replicas
    value = throughput(params, 1, replicas, atomic, steps) * efficiency(statistics_, total / BOUNDS.init_batch)
    return float(value[(total >= BOUNDS.init_batch) & (total <= BOUNDS.max_batch)].max())


def measure() -> list[Measurement]:
    rng = np.random.default_rng(0)
    seconds: list[float] = []
    lost: list[float] = []
    replicas = np.arange(1, 1001)
    for _ in range(60):
        compute, sync = 10 ** rng.uniform(-3, -1), 10 ** rng.uniform(-4, 0)
        params = ThroughputParams(
            compute, compute / 50, 2 * sync, 0.1 * sync, sync, 0.1 * sync, float(rng.uniform(1, 10))
        )
        noise = GradientStatistics(sqr=1.0, var=float(10 ** rng.uniform(-2, 3)))
        began = time.perf_counter()
        choose_batches(params, noise, BOUNDS, np.where(replicas > 8, 2, 1), replicas)
        seconds.append(time.perf_counter() - began)
        lost.extend(
            1.0 - choose_batch(params, noise, BOUNDS, 1, count).goodput / exact(params, noise, count)
            for count in (1, 2, 3, 5, 8, 16)
        )
    return [
        Measurement(
            what="1,000 allocations",
            ours=1e3 * statistics.median(seconds),
            peer=5.0,
            unit="ms",
            peer_name="the goal",
            target=1.0,
        ),
        Measurement(
            what="goodput lost, worst of 360",
            ours=100 * max(lost),
            peer=0.5,
            unit="%",
            peer_name="the goal",
            target=1.0,
        ),
    ]
