"""Objectives over gradient boosting, as their users write them: a report after each round."""

from __future__ import annotations

from typing import Any

import numpy as np
import optuna
from sklearn.datasets import load_breast_cancer

ROUNDS = 12


def split() -> tuple[Any, Any, Any, Any]:
    rows, labels = load_breast_cancer(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(labels))
    rows, labels = rows[order], labels[order]
    return rows[:400], labels[:400], rows[400:], labels[400:]


def with_xgboost(trial: optuna.Trial) -> float:
    import xgboost

    rows, labels, held_out, answers = split()
    reported: list[float] = []

    class Reports(xgboost.callback.TrainingCallback):
        def after_iteration(self, model: Any, epoch: int, evals_log: Any) -> bool:
            reported.append(evals_log["held_out"]["logloss"][-1])
            trial.report(reported[-1], epoch)
            if trial.should_prune():
                raise optuna.TrialPruned
            return False

    parameters = {
        "objective": "binary:logistic",
        "eta": trial.suggest_float("eta", 0.01, 0.5, log=True),
        "max_depth": trial.suggest_int("max_depth", 2, 5),
        "nthread": 1,
        "seed": 0,
    }
    data = xgboost.DMatrix(rows, labels)
    evals = [(xgboost.DMatrix(held_out, answers), "held_out")]
    xgboost.train(parameters, data, ROUNDS, evals=evals, callbacks=[Reports()], verbose_eval=False)
    return reported[-1]


def with_lightgbm(trial: optuna.Trial) -> float:
    import lightgbm

    rows, labels, held_out, answers = split()
    reported: list[float] = []

    def reports(environment: Any) -> None:
        reported.append(environment.evaluation_result_list[0][2])
        trial.report(reported[-1], environment.iteration)
        if trial.should_prune():
            raise optuna.TrialPruned

    parameters = {
        "objective": "binary",
        "metric": "binary_logloss",
        "learning_rate": trial.suggest_float("learning_rate", 0.01, 0.5, log=True),
        "num_leaves": trial.suggest_int("num_leaves", 4, 31),
        "verbosity": -1,
        "num_threads": 1,
        "seed": 0,
        "deterministic": True,
    }
    data = lightgbm.Dataset(rows, labels)
    lightgbm.train(parameters, data, ROUNDS, valid_sets=[lightgbm.Dataset(held_out, answers)], callbacks=[reports])
    return reported[-1]


def with_scikit_learn(trial: optuna.Trial) -> float:
    from sklearn.ensemble import HistGradientBoostingClassifier
    from sklearn.metrics import log_loss

    rows, labels, held_out, answers = split()
    model = HistGradientBoostingClassifier(
        learning_rate=trial.suggest_float("learning_rate", 0.01, 0.5, log=True),
        max_leaf_nodes=trial.suggest_int("max_leaf_nodes", 4, 31),
        max_iter=ROUNDS,
        random_state=0,
    ).fit(rows, labels)
    for step, odds in enumerate(model.staged_predict_proba(held_out)):
        trial.report(float(log_loss(answers, odds)), step)
        if trial.should_prune():
            raise optuna.TrialPruned
    return float(log_loss(answers, model.predict_proba(held_out)))
