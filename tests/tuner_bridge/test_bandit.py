"""The model by which a population chooses parameters."""

from __future__ import annotations

from typing import Any

import numpy as np
import optuna
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution

from tuner_bridge.optuna.bandit import LEAST_STRETCHES, Bandit, Stretch

X: dict[str, BaseDistribution] = {"x": FloatDistribution(0.0, 1.0)}


def told(best_at: dict[int, float], each: int = 12) -> Bandit:
    """Stretches of which those at each time gain the more the nearer they are to the best one then."""
    rng, bandit = np.random.default_rng(3), Bandit()
    for time, best in best_at.items():
        for _ in range(each):
            x = float(rng.random())
            gain = 1.0 - 4.0 * (x - best) ** 2 + 0.02 * float(rng.normal())
            bandit.note(Stretch({"x": x}, time, before=float(rng.random()), gain=gain))
    return bandit


def proposals(bandit: Bandit, time: int, under_way: list[Stretch] | None = None) -> list[float]:
    return [
        bandit.propose(X, Stretch({}, time, 0.5), under_way or [], np.random.default_rng(seed))["x"]
        for seed in range(5)
    ]


@pytest.mark.parametrize("best", [0.2, 0.7])
def test_parameters_that_gained_most_are_proposed(best: float) -> None:
    assert np.median(proposals(told(dict.fromkeys(range(3), best)), 3)) == pytest.approx(best, abs=0.12)


def test_what_gained_long_ago_counts_less() -> None:
    moved = told({0: 0.2, 1: 0.2, 20: 0.8, 21: 0.8})
    assert np.median(proposals(moved, 22)) == pytest.approx(0.8, abs=0.15)


def test_what_others_try_already_is_tried_less() -> None:
    bandit = told({0: 0.5}, each=5)
    alone = proposals(bandit, 1)
    beside = proposals(bandit, 1, [Stretch({"x": each}, 1, 0.5) for each in alone])
    assert np.abs(np.subtract(beside, alone)).max() > 0.02


def test_nothing_is_proposed_before_enough_is_known_or_for_categories_alone() -> None:
    bandit, rng = Bandit(), np.random.default_rng(1)
    for count in range(LEAST_STRETCHES):
        assert bandit.propose(X, Stretch({}, 1, 0.0), [], rng) == {}
        bandit.note(Stretch({"x": 0.1 * count}, count, 0.0, 1.0))
    assert bandit.propose(X, Stretch({}, 1, 0.0), [], rng)
    assert bandit.propose({"kind": CategoricalDistribution(["a", "b"])}, Stretch({}, 1, 0.0), [], rng) == {}


SPACES = st.one_of(
    st.floats(1e-3, 1.0).map(lambda low: FloatDistribution(low, 10.0, log=True)),
    st.integers(-5, 5).map(lambda low: FloatDistribution(low, low + 3.0, step=0.5)),
    st.integers(1, 5).map(lambda low: IntDistribution(low, low + 6, step=2)),
    st.integers(1, 5).map(lambda low: IntDistribution(low, low + 100, log=True)),
    st.just(FloatDistribution(2.0, 2.0)),
)


@settings(max_examples=15, deadline=None)
@given(st.lists(SPACES, min_size=1, max_size=3), st.integers(0, 1000), st.sampled_from([0.0, 1.0, 1e9]))
def test_proposals_lie_within_their_spaces(spaces: list[BaseDistribution], seed: int, gain: float) -> None:
    named = {f"p{index}": space for index, space in enumerate(spaces)}
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=seed))
    bandit = Bandit()
    drawn: dict[str, Any] = {}
    for time in range(6):
        drawn = study.ask(named).params
        bandit.note(Stretch(drawn, time, 0.0, gain * time))
    proposed = bandit.propose(named, Stretch(drawn, 6, gain), [Stretch(drawn, 6, 0.0)], np.random.default_rng(seed))
    assert proposed.keys() == named.keys()
    for name, space in named.items():
        assert space._contains(space.to_internal_repr(proposed[name])), (name, proposed[name])
