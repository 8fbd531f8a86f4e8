"""What a study's trials have measured, as one model."""

from __future__ import annotations

import numpy as np
import pytest

from dist_core.goodput import (
    BatchBounds,
    Configuration,
    GradientStatistics,
    Hints,
    Observation,
    ThroughputParams,
    optim_seconds,
)
from dist_core.goodput.throughput import gradient_seconds
from scheduler.knowledge.profile import StudyProfile, TrialModel, noise_at, noise_bin, pool
from scheduler.knowledge.study_history import StudyHistory

TRUE = ThroughputParams(0.02, 0.001, 0.05, 0.003, 0.02, 0.002, 1.6)
BOUNDS = BatchBounds(init_batch=64, max_batch=2048, min_atomic=8, max_atomic=256)


def rows(*keys: tuple[int, int, int], factor: float = 1.0) -> tuple[Observation, ...]:
    return tuple(
        Observation(
            Configuration(*key),
            factor * float(gradient_seconds(TRUE, key[2])),
            factor * float(optim_seconds(TRUE, *key[:3])),
            20,
        )
        for key in keys
    )


SMALL = [(1, 1, batch) for batch in (16, 32, 64, 128, 256)]
LARGE = [(1, 4, 64), (2, 8, 64), (2, 8, 128), (4, 16, 64)]


def hints(*observations: Observation, progress: float = 0.0, noise: float | None = 10.0) -> Hints:
    return Hints(
        bounds=BOUNDS,
        observations=observations,
        statistics=None if noise is None else GradientStatistics(sqr=1.0, var=noise),
        progress=progress,
        target_progress=1000.0,
    )


def test_trials_that_differ_by_a_factor_make_one_model() -> None:
    made = pool({"a": rows(*SMALL, *LARGE), "b": rows((1, 1, 64), factor=3.0)})
    assert made is not None
    profile, factors = made
    assert factors == {"a": 1.0, "b": pytest.approx(3.0)}
    believed = optim_seconds(profile.params, [2, 4], [8, 16], [64, 64])
    np.testing.assert_allclose(believed, optim_seconds(TRUE, [2, 4], [8, 16], [64, 64]), rtol=0.05)
    assert profile.most_replicas == 16


def test_a_trial_with_nothing_in_common_is_placed_by_the_model() -> None:
    made = pool({"a": rows(*SMALL, *LARGE), "b": rows((1, 1, 48), (1, 1, 100), factor=0.5)})
    assert made is not None
    assert made[1]["b"] == pytest.approx(0.5, rel=0.03)


def test_nothing_measured_makes_no_model() -> None:
    assert pool({}) is None
    assert pool({"a": ()}) is None


def test_goodput_is_divided_by_the_factor_and_tables_are_shared() -> None:
    profile = StudyProfile(params=TRUE, most_replicas=8)
    fast, slow = (TrialModel(profile=profile, bounds=BOUNDS, noise=20.0, factor=factor) for factor in (1.0, 2.0))
    counts = np.array([1, 2, 4, 8])
    np.testing.assert_allclose(fast.curve(4, counts), 2.0 * slow.curve(4, counts))
    np.testing.assert_allclose(fast.curve(4, counts), fast.goodput(-(-counts // 4), counts), rtol=0.05)


def test_the_model_is_corrected_where_it_misses_what_was_measured() -> None:
    observed = [*rows(*SMALL, *LARGE)]
    odd = [
        Observation(row.configuration, row.gradient_seconds, 2.0 * row.optim_seconds, row.count)
        if row.configuration.num_replicas == 4
        else row
        for row in observed
    ]
    made = pool({"a": odd})
    assert made is not None
    profile = made[0]
    key = Configuration(1, 4, 64)
    believed = float(optim_seconds(profile.params, *key[:3])) * float(profile.slowdown(np.array([4]))[0])
    assert believed == pytest.approx(2.0 * float(optim_seconds(TRUE, *key[:3])), rel=0.25)
    assert profile.slowdown(np.array([64]))[0] <= 1.0


def test_noise_is_taken_from_the_nearest_part() -> None:
    assert noise_at({}, 0.5) is None
    assert noise_at({noise_bin(0.1): 3.0, noise_bin(0.9): 30.0}, 0.8) == 30.0


def test_a_new_trial_has_a_model_before_its_first_step() -> None:
    history = StudyHistory()
    assert history.model("new", None) is None
    history.note("a", hints(*rows(*SMALL, *LARGE), progress=500.0, noise=40.0))
    history.note("b", hints(*rows((1, 1, 64)), progress=10.0, noise=4.0))
    history.refresh(0.0)
    model = history.model("new", None)
    assert model is not None
    assert model.noise == 4.0
    assert model.most_profiled == 16
    assert history.typical_target == 1000.0


def test_the_profile_is_made_anew_only_when_something_new_is_said() -> None:
    history = StudyHistory()
    history.note("a", hints(*rows(*SMALL)))
    history.refresh(0.0)
    first = history.model("a", None)
    history.note("a", hints(*rows(*SMALL)))
    history.refresh(100.0)
    second = history.model("a", None)
    history.note("a", hints(*rows(*SMALL, *LARGE)))
    history.refresh(200.0)
    third = history.model("a", None)
    assert first is not None and second is not None and third is not None
    assert second.profile is first.profile
    assert third.profile is not first.profile
