"""Objectives over gradient boosting run as they are: the same values, reports and pruned trials as in plain Optuna."""

from __future__ import annotations

from typing import Any

import optuna
import pytest

from tests.support import boosting
from tuner_bridge import optimize

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


def new_study() -> optuna.Study:
    return optuna.create_study(
        sampler=optuna.samplers.RandomSampler(seed=0), pruner=optuna.pruners.MedianPruner(n_startup_trials=2)
    )


@pytest.mark.usefixtures("scheduler")
@pytest.mark.parametrize("objective", [boosting.with_scikit_learn, boosting.with_xgboost, boosting.with_lightgbm])
def test_an_objective_over_boosting_runs_as_it_is(objective: Any) -> None:
    plain, elastic = new_study(), new_study()
    plain.optimize(objective, n_trials=6)
    optimize(elastic, objective, n_trials=6)
    assert any(trial.state == optuna.trial.TrialState.PRUNED for trial in plain.trials)
    for found, expected in zip(elastic.trials, plain.trials, strict=True):
        assert (found.state, found.params) == (expected.state, expected.params)
        assert found.value == pytest.approx(expected.value, rel=1e-6)
        assert found.intermediate_values == pytest.approx(expected.intermediate_values, rel=1e-6)
