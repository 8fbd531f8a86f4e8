from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dist_core.goodput import Configuration, Observation, ThroughputParams, fit_throughput, optim_seconds
from dist_core.goodput.fit import _Problem, _Residuals
from dist_core.goodput.throughput import gradient_seconds

TRUE = ThroughputParams(0.02, 0.001, 0.05, 0.004, 0.01, 0.002, 2.0)


def observe(
    allocations: list[tuple[int, int]], batches: list[int], *, noise: float = 0.0, outliers: float = 0.0, seed: int = 0
) -> list[Observation]:
    rng = np.random.default_rng(seed)
    rows = []
    for nodes, replicas in allocations:
        for batch in batches:
            slow = 4.0 if rng.random() < outliers else 1.0
            gradient = float(gradient_seconds(TRUE, batch)) * np.exp(noise * rng.normal()) * slow
            optim = float(optim_seconds(TRUE, nodes, replicas, batch)) * np.exp(noise * rng.normal()) * slow
            rows.append(Observation(Configuration(nodes, replicas, batch), gradient, max(optim, gradient), 10))
    return rows


EVERYWHERE = [(1, 1), (1, 2), (1, 4), (2, 4), (2, 8), (4, 16)]
BATCHES = [8, 16, 32, 64, 128, 256]


def held_out_error(params: ThroughputParams) -> float:
    nodes, replicas, batch = np.array([1, 1, 2, 4]), np.array([3, 8, 6, 32]), np.array([48, 96, 24, 200])
    predicted = optim_seconds(params, nodes, replicas, batch)
    return float(np.median(np.abs(np.log(predicted / optim_seconds(TRUE, nodes, replicas, batch)))))


def test_clean_observations_are_reproduced_beyond_what_was_seen() -> None:
    params = fit_throughput(observe(EVERYWHERE, BATCHES))
    assert params is not None
    assert held_out_error(params) < 0.005


def test_outliers_do_not_carry_the_fit_away() -> None:
    params = fit_throughput(observe(EVERYWHERE, BATCHES, noise=0.05, outliers=0.1))
    assert params is not None
    assert held_out_error(params) < 0.05


def test_warm_start_ends_at_the_same_fit() -> None:
    rows = observe(EVERYWHERE, BATCHES, noise=0.02)
    cold = fit_throughput(rows)
    warm = fit_throughput(rows, warm_start=cold)
    assert cold is not None
    assert warm is not None
    assert held_out_error(warm) == pytest.approx(held_out_error(cold), abs=0.003)


def test_jacobian_is_the_derivative_of_the_residuals() -> None:
    problem = _Problem.of(observe(EVERYWHERE, BATCHES, noise=0.1))
    residuals = _Residuals(problem, problem.start(), 0.1)
    point = problem.start() + 0.3
    _, jacobian = residuals(point)
    for column in range(7):
        step = np.zeros(7)
        step[column] = 1e-6
        difference = (residuals(point + step)[0] - residuals(point - step)[0]) / 2e-6
        np.testing.assert_allclose(jacobian[:, column], difference, atol=1e-6)


def test_nothing_observed_gives_no_model() -> None:
    assert fit_throughput([]) is None


def test_one_batch_size_invites_a_larger_one() -> None:
    params = fit_throughput(observe([(1, 1)], [64]))
    assert params is not None
    assert float(gradient_seconds(params, 128)) < 2 * float(gradient_seconds(params, 64))


def test_a_reduction_across_nodes_never_seen_costs_more_than_one_within() -> None:
    params = fit_throughput(observe([(1, 1), (1, 2), (1, 4)], BATCHES))
    assert params is not None
    assert params.alpha_n > params.alpha_r > 0


seconds = st.floats(1e-5, 1e3, allow_nan=False)


@settings(max_examples=150, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(1, 4), st.integers(1, 16), st.integers(1, 1000), seconds, seconds, st.integers(1, 48)),
        min_size=1,
        max_size=7,
    )
)
def test_any_measurements_give_finite_parameters(rows: list[tuple[int, int, int, float, float, int]]) -> None:
    observations = [
        Observation(Configuration(min(nodes, replicas), replicas, batch), gradient, optim, count)
        for nodes, replicas, batch, gradient, optim, count in rows
    ]
    params = fit_throughput(observations)
    assert params is not None
    assert np.isfinite(float(optim_seconds(params, 2, 8, 64)))
