from __future__ import annotations

import numpy as np
import pytest

from dist_core.gradients.noise.estimator import NoiseScale, from_parts, is_measured

DIMENSION = 200
TRUE_GRADIENT = np.full(DIMENSION, 0.1)
TRUE_SQR = float(TRUE_GRADIENT @ TRUE_GRADIENT)
TRUE_TRACE = 4.0 * DIMENSION


def examples(count: int, rng: np.random.Generator) -> np.ndarray:
    """Per-example gradients with a known mean and covariance."""
    return TRUE_GRADIENT + 2.0 * rng.normal(size=(count, DIMENSION))


@pytest.mark.parametrize("sizes", [[8, 8], [1, 15], [4, 4, 4, 4], [1, 2, 3, 10], [2] * 8])
def test_replica_estimator_is_unbiased_for_any_split(sizes: list[int]) -> None:
    rng = np.random.default_rng(len(sizes))
    sqrs, traces = [], []
    batch = sum(sizes)
    for _ in range(3000):
        means = [examples(size, rng).mean(axis=0) for size in sizes]
        weights = [size / batch for size in sizes]
        local = sum(weight * mean @ mean for weight, mean in zip(weights, means, strict=True))
        mean = sum(weight * mean for weight, mean in zip(weights, means, strict=True))
        sqr, trace = from_parts(local, mean @ mean, num_parts=len(sizes), global_batch=batch)
        sqrs.append(sqr)
        traces.append(trace)
    for values, truth in ((sqrs, TRUE_SQR), (traces, TRUE_TRACE)):
        error = np.std(values) / np.sqrt(len(values))
        assert abs(np.mean(values) - truth) < 3.5 * error


def test_average_converges_to_the_truth() -> None:
    rng = np.random.default_rng(3)
    noise = NoiseScale()
    for _ in range(2000):
        means = [examples(8, rng).mean(axis=0) for _ in range(2)]
        local = 0.5 * sum(mean @ mean for mean in means)
        whole = 0.5 * (means[0] + means[1])
        noise.update(*from_parts(local, whole @ whole, num_parts=2, global_batch=16), work=2.0)
    statistics = noise.statistics_at(8)
    assert statistics is not None
    assert statistics.var == pytest.approx(TRUE_TRACE / 8, rel=0.02)


def test_overflowed_steps_are_not_measurements() -> None:
    noise = NoiseScale()
    assert not noise.update(float("nan"), 1.0, work=1.0)
    assert not noise.update(1.0, float("inf"), work=1.0)
    assert noise.statistics_at(8) is None
    for _ in range(4):
        assert noise.update(1.0, 8.0, work=1.0)
    found = noise.statistics_at(8)
    assert found is not None
    assert found.sqr == pytest.approx(1.0)
    assert found.var == pytest.approx(1.0)


def test_estimates_below_zero_stay_usable() -> None:
    noise = NoiseScale()
    for _ in range(5):
        noise.update(-3.0, 10.0, work=1.0)
    statistics = noise.statistics_at(1)
    assert statistics is not None
    assert statistics.sqr == pytest.approx(0.01, rel=1e-4)


def test_the_answer_follows_gradients_that_shrink() -> None:
    """Ten thousand times smaller gradients at the end, whose noise scale has grown from 8 to 80 on the way."""
    noise = NoiseScale()
    for step in range(2000):
        level = 10.0 ** (-4.0 * step / 2000)
        scale = 8.0 * 10.0 ** (step / 2000)
        noise.update(level, level * scale, work=1.0)
    statistics = noise.statistics_at(8)
    assert statistics is not None
    assert 8 * statistics.var / statistics.sqr > 35.0
    sqr, trace = noise.averages
    # An average of what gradients were speaks of long ago.
    assert trace / sqr < 35.0


def test_state_is_restored() -> None:
    noise, other = NoiseScale(), NoiseScale()
    for value in range(6):
        noise.update(1.0 + value, 2.0, work=1.0)
    other.load_state_dict(noise.state_dict())
    assert other.statistics_at(4) == noise.statistics_at(4)


def test_every_window_of_several_replicas_holds_enough_measurements() -> None:
    """A window is a fifth of the steps so far, at least twenty."""
    measured = [is_measured(step, num_replicas=2, every=None) for step in range(5000)]
    for end in range(100, 5000, 50):
        window = measured[end - max(20, end // 5) : end]
        assert sum(window) >= 8
    assert sum(measured[1000:]) == 400
    alone = [is_measured(step, num_replicas=1, every=None) for step in range(1000)]
    assert sum(alone[:40]) == 20
    assert sum(alone[40:]) == 96
