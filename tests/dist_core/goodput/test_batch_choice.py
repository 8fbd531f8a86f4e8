from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dist_core.goodput import (
    BatchBounds,
    GradientStatistics,
    ThroughputParams,
    choose_batch,
    choose_batches,
    efficiency,
    fixed_choice,
    gain,
    throughput,
)

PARAMS = ThroughputParams(0.02, 0.001, 0.05, 0.004, 0.01, 0.002, 2.0)
NOISY = GradientStatistics(sqr=1.0, var=30.0)


def brute_force(
    bounds: BatchBounds, replicas: int, statistics: GradientStatistics = NOISY, params: ThroughputParams = PARAMS
) -> float:
    best = 0.0
    for atomic, steps in itertools.product(range(bounds.min_atomic, bounds.largest_atomic + 1), range(16)):
        total = atomic * (steps + 1) * replicas
        if not bounds.init_batch <= total <= bounds.max_batch or (steps and not bounds.accumulation):
            continue
        speed = float(throughput(params, 1, replicas, atomic, steps))
        best = max(best, speed * float(efficiency(statistics, total / bounds.init_batch)))
    return best


@settings(max_examples=300, deadline=None, derandomize=True)
@given(
    alpha=st.floats(1e-4, 0.2),
    beta=st.floats(1e-6, 0.01),
    sync=st.floats(1e-5, 0.5),
    gamma=st.floats(1.0, 10.0),
    noise=st.floats(0.0, 1e4),
    init=st.integers(2, 128),
    growth=st.integers(2, 32),
    bounds=st.tuples(st.integers(1, 32), st.integers(0, 100)),
    replicas=st.integers(1, 9),
    accumulation=st.booleans(),
)
def test_choice_is_within_half_a_percent_of_the_exact_optimum_for_any_model(
    alpha: float,
    beta: float,
    sync: float,
    gamma: float,
    noise: float,
    init: int,
    growth: int,
    bounds: tuple[int, int],
    replicas: int,
    accumulation: bool,
) -> None:
    params = ThroughputParams(alpha, beta, 2 * sync, 0.1 * sync, sync, 0.1 * sync, gamma)
    allowed = BatchBounds(
        init_batch=init,
        max_batch=init * growth,
        min_atomic=bounds[0],
        max_atomic=bounds[0] + bounds[1],
        accumulation=accumulation,
    )
    statistics = GradientStatistics(sqr=1.0, var=noise)
    best = brute_force(allowed, replicas, statistics, params)
    choice = choose_batch(params, statistics, allowed, 1, replicas)
    if best > 0.0:
        assert choice.goodput >= 0.995 * best
        assert init <= choice.global_batch(replicas) <= allowed.max_batch


def test_many_allocations_at_once_are_what_each_gets_alone() -> None:
    bounds = BatchBounds(init_batch=64, max_batch=2048, min_atomic=8, max_atomic=256)
    nodes, replicas = np.array([1, 1, 2, 4, 2, 1]), np.array([1, 4, 4, 8, 4, 7])
    together = choose_batches(PARAMS, NOISY, bounds, nodes, replicas)
    for index in range(len(nodes)):
        alone = choose_batch(PARAMS, NOISY, bounds, int(nodes[index]), int(replicas[index]))
        assert alone.atomic_batch == together.atomic_batch[index]
        assert alone.accumulation == together.accumulation[index]
        assert alone.goodput == together.goodput[index]


@settings(max_examples=100, deadline=None)
@given(
    init=st.integers(1, 200),
    growth=st.integers(1, 50),
    lower=st.integers(1, 40),
    spread=st.integers(0, 400),
    replicas=st.integers(1, 16),
)
def test_choice_stays_within_bounds_that_can_be_met(
    init: int, growth: int, lower: int, spread: int, replicas: int
) -> None:
    bounds = BatchBounds(init_batch=init, max_batch=init * growth, min_atomic=lower, max_atomic=lower + spread)
    choice = choose_batch(PARAMS, NOISY, bounds, 1, replicas)
    if bounds.adaptive:
        assert bounds.min_atomic <= choice.atomic_batch <= bounds.largest_atomic
        possible = any(
            init <= atomic * (steps + 1) * replicas <= bounds.max_batch
            for atomic in range(lower, min(lower + spread, bounds.max_batch) + 1)
            for steps in range(16)
        )
        if choice.global_batch(replicas) > bounds.max_batch:
            assert not possible
    else:
        assert choice.atomic_batch * (choice.accumulation + 1) * replicas >= init


def test_fixed_batch_is_split_over_replicas_and_micro_batches() -> None:
    bounds = BatchBounds(init_batch=100, max_batch=100, max_atomic=40)
    assert fixed_choice(bounds, 1) == (34, 2)
    assert fixed_choice(bounds, 4) == (25, 0)


def test_noisier_gradients_earn_larger_batches() -> None:
    bounds = BatchBounds(init_batch=32, max_batch=4096, min_atomic=8, max_atomic=1024)
    batches = [
        choose_batch(PARAMS, GradientStatistics(sqr=1.0, var=var), bounds, 1, 2).global_batch(2)
        for var in (0.1, 10.0, 1000.0)
    ]
    assert batches == sorted(batches)
    assert batches[0] < batches[-1]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"init_batch": 0, "max_batch": 1}, "batch_size is 0"),
        ({"init_batch": 64, "max_batch": 32}, "max_batch_size must be at least batch_size"),
        ({"init_batch": 64, "max_batch": 64, "min_atomic": 9, "max_atomic": 8}, "must not exceed the upper"),
    ],
)
def test_contradictory_bounds_are_refused(arguments: dict[str, int], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        BatchBounds(**arguments)  # type: ignore[arg-type]


def test_gain_lies_between_one_and_the_scale() -> None:
    scales = np.linspace(1.0, 64.0, 50)
    values = gain(NOISY, scales)
    assert (values >= 1.0).all()
    assert (values <= scales + 1e-12).all()
    assert (np.diff(values) > 0).all()
    np.testing.assert_allclose(efficiency(GradientStatistics(sqr=0.0, var=1.0), scales), 1.0)
