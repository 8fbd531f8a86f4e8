"""Population based training, and trials that continue others."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import optuna
import pytest
from hypothesis import given
from hypothesis import strategies as st
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.trial import FrozenTrial, TrialState

from tests.support.objectives import descends
from tuner_bridge import Population, enqueue_from, optimize
from tuner_bridge.errors import InvalidSweep
from tuner_bridge.optuna.population import MEMBER, PARENT, Member, Standings

SPACES: dict[str, BaseDistribution] = {
    "lr": FloatDistribution(1e-4, 1.0, log=True),
    "momentum": FloatDistribution(0.0, 0.9, step=0.1),
    "depth": IntDistribution(1, 9, step=2),
    "batch": CategoricalDistribution([16, 32, 64]),
    "kind": CategoricalDistribution(["a", "b"]),
}
PARAMETERS = {"lr": 0.1, "momentum": 0.3, "depth": 3, "batch": 32, "kind": "a"}


# ---------------------------------------------------------------------- decisions


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=20), st.floats(0.01, 0.5), st.integers(0, 99))
def test_the_worst_go_on_from_the_best_and_nobody_from_a_worse_one(
    values: list[float], quantile: float, seed: int
) -> None:
    population = Population(size=20, quantile=quantile)
    scores = dict(enumerate(values))
    winners = {each: population.winner_for(each, scores, random.Random(seed)) for each in scores}
    replaced = {loser: winner for loser, winner in winners.items() if winner is not None}
    assert all(scores[winner] > scores[loser] for loser, winner in replaced.items())
    assert len(replaced) <= len(values) // 2
    assert not set(replaced) & set(replaced.values())
    if len(set(values)) == len(values) > 1:
        assert replaced, "of different scores the worst is replaced"


@given(st.integers(0, 10_000), st.floats(1.01, 4.0), st.floats(0.0, 1.0))
def test_what_is_explored_lies_within_its_space(seed: int, perturb: float, resample: float) -> None:
    population = Population(size=4, perturb=perturb, resample=resample)
    rng = random.Random(seed)
    drawn = {"lr": 0.5, "momentum": 0.9, "depth": 1, "batch": 64, "kind": "b"}
    changed: dict[str, Any] = dict(PARAMETERS)
    for _ in range(5):
        changed = population.explored(changed, SPACES, lambda name, space: drawn[name], rng)
    for name, space in SPACES.items():
        assert space._contains(space.to_internal_repr(changed[name])), (name, changed[name])


def test_only_the_parameters_that_are_named_change() -> None:
    population = Population(size=4, resample=0.0, parameters=["lr"])
    changed = population.explored(PARAMETERS, SPACES, lambda name, space: None, random.Random(1))
    assert changed["lr"] in (pytest.approx(0.12), pytest.approx(0.1 / 1.2))
    assert {**changed, "lr": 0.1} == PARAMETERS


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"size": 1}, "size is 1; it must be a whole number of at least 2"),
        ({"every": "soon"}, "every is 'soon'; write a number of epochs, such as '4 epochs'"),
        ({"every": 0}, "every is 0; it must be at least 1 report"),
        ({"quantile": 0.6}, "quantile is 0.6; it must be above 0 and at most 0.5"),
        ({"perturb": 1.0}, "perturb is 1.0; it must be a factor above 1"),
        ({"resample": -0.1}, "resample is -0.1; it must be a probability"),
    ],
)
def test_a_population_that_cannot_work_is_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidSweep, match=words):
        Population(**{"size": 4, **options})


def test_members_that_are_ahead_wait_for_the_others() -> None:
    study = optuna.create_study()
    members = [Member(index, study.ask(), stretches=count) for index, count in enumerate([2, 1, 1])]
    standings = Standings(members)
    assert [standings.to_hold(each) for each in members] == [True, False, False]
    members[1].is_over = members[2].is_over = True
    assert not standings.to_hold(members[0])


# ---------------------------------------------------------------------- sweeps


def lineage(trials: dict[int, FrozenTrial], last: FrozenTrial) -> list[int]:
    """The steps of a trial and of those that it goes back to, oldest first."""
    steps: list[int] = []
    trial: FrozenTrial | None = last
    while trial is not None:
        first = steps[0] if steps else 10**9
        steps = [*(step for step in sorted(trial.intermediate_values) if step < first), *steps]
        parent = trial.user_attrs.get(PARENT)
        trial = None if parent is None else trials[parent]
    return steps


@pytest.mark.slow
def test_a_population_trains_each_epoch_once_and_the_worst_go_on_from_the_best(tmp_path: Path) -> None:
    """Four members on two slots, so that they also wait for each other: five seconds of training."""
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=3))
    for rate in (1e-5, 1e-4, 0.1, 0.2):
        study.enqueue_trial({"lr": rate, "epochs": 8})
    ended: list[int] = []
    optimize(
        study,
        descends,
        population=Population(size=4, every=2, parameters=["lr"], seed=1),
        slots=2,
        max_replicas=1,
        state_dir=tmp_path,
        callbacks=[lambda study, trial: ended.append(trial.number)],
    )
    trials = {trial.number: trial for trial in study.trials}
    assert sorted(ended) == sorted(trials)
    assert {trial.state for trial in trials.values()} <= {TrialState.COMPLETE, TrialState.PRUNED}
    last = [trial for trial in trials.values() if 7 in trial.intermediate_values]
    assert len({trial.user_attrs[MEMBER] for trial in last}) == len(last) >= 3
    for trial in last:
        assert lineage(trials, trial) == list(range(8))
    for trial in trials.values():
        parent = trials.get(trial.user_attrs.get(PARENT, -1))
        if parent is not None and parent.user_attrs[MEMBER] != trial.user_attrs[MEMBER]:
            # It goes on from the winner's weights, which are better than those that its member had.
            first = trial.intermediate_values[min(trial.intermediate_values)]
            (*_, before) = (
                each
                for each in trials.values()
                if each.number < trial.number and each.user_attrs[MEMBER] == trial.user_attrs[MEMBER]
            )
            assert first < before.intermediate_values[max(before.intermediate_values)]
    assert study.best_value < 0.1


@pytest.mark.slow
def test_a_finished_trial_trains_on_from_its_end(tmp_path: Path) -> None:
    study = optuna.create_study()
    study.enqueue_trial({"lr": 0.01, "epochs": 3})
    study.enqueue_trial({"lr": 0.05, "epochs": 3})
    sweep: dict[str, Any] = {"slots": 2, "max_replicas": 1, "state_dir": tmp_path, "keep_states": True}
    optimize(study, descends, n_trials=2, **sweep)
    best = study.best_trial
    assert enqueue_from(study, top=1, params={"epochs": 6}) == [best.number]
    optimize(study, descends, n_trials=1, **sweep)
    longer = study.trials[-1]
    assert sorted(longer.intermediate_values) == [3, 4, 5]
    assert longer.params == {**best.params, "epochs": 6}
    assert longer.value is not None and best.value is not None and longer.value < best.value
    study.enqueue_trial(best.params, user_attrs={PARENT: best.number})
    with pytest.raises(Exception, match="nothing is left to train"):
        optimize(study, descends, n_trials=1, **sweep)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"n_trials": 4}, "n_trials and n_jobs mean nothing beside population="),
        ({"resume": True}, "a population cannot be resumed"),
    ],
)
def test_what_means_nothing_beside_a_population_is_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidSweep, match=words):
        optimize(optuna.create_study(), descends, population=Population(size=2), **options)


def test_a_continuation_of_nothing_is_refused() -> None:
    study = optuna.create_study()
    with pytest.raises(InvalidSweep, match="top is 1, and the study has 0 complete trials"):
        enqueue_from(study)
    study.add_trial(optuna.trial.create_trial(params={"lr": 0.1}, distributions={"lr": SPACES["lr"]}, value=1.0))
    with pytest.raises(InvalidSweep, match="no trial has a parameter 'epochs'; they have lr"):
        enqueue_from(study, params={"epochs": 3})
