from __future__ import annotations

import pytest

from dist_core.goodput import Configuration, Observation
from scheduler.pooling import pool_observations


def row(replicas: int, seconds: float, count: int = 10) -> Observation:
    return Observation(Configuration(1, replicas, 32), seconds, seconds, count)


def test_others_fill_in_what_was_not_run_at_ones_own_speed() -> None:
    [pooled] = pool_observations([row(1, 2.0)], [[row(1, 1.0), row(2, 0.6)]])
    assert pooled.configuration.num_replicas == 2
    assert pooled.optim_seconds == pytest.approx(1.2)
    assert pooled.count < 10


def test_without_a_common_configuration_nothing_is_taken_over() -> None:
    assert pool_observations([row(1, 2.0)], [[row(2, 0.6)]]) == []
    assert pool_observations([], [[row(1, 1.0)]]) == []
