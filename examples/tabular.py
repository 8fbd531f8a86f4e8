"""Tune a gradient boosting of scikit-learn's and a small network of torch's on one table, and see which is better.

    python examples/tabular.py [--trials 12] [--slots 2]

The network's trials are elastic. Those of scikit-learn's are plain functions beside them, in the same study.
"""

from __future__ import annotations

import argparse
from typing import Any

import optuna
import torch
from sklearn.datasets import load_breast_cancer
from sklearn.ensemble import HistGradientBoostingClassifier
from sklearn.model_selection import train_test_split
from sklearn.preprocessing import StandardScaler
from torch import nn
from torch.utils.data import TensorDataset

from dist_core import AdaptiveDataLoader, AdaptiveDataParallel, remaining_epochs_until
from tuner_bridge import optimize


def table() -> tuple[Any, Any, Any, Any]:
    x, y = load_breast_cancer(return_X_y=True)
    x_train, x_valid, y_train, y_valid = train_test_split(x, y, test_size=0.3, random_state=0)
    scaler = StandardScaler().fit(x_train)
    return scaler.transform(x_train), scaler.transform(x_valid), y_train, y_valid


def boosted(trial: Any) -> float:
    x_train, x_valid, y_train, y_valid = table()
    model = HistGradientBoostingClassifier(
        learning_rate=trial.suggest_float("boosting_rate", 0.01, 0.5, log=True),
        max_leaf_nodes=trial.suggest_int("leaves", 4, 32),
        max_iter=60,
        random_state=0,
    )
    return float(model.fit(x_train, y_train).score(x_valid, y_valid))


def network(trial: Any) -> float:
    x_train, x_valid, y_train, y_valid = (torch.as_tensor(each, dtype=torch.float32) for each in table())
    torch.manual_seed(0)
    width = trial.suggest_int("width", 8, 64, log=True)
    net = nn.Sequential(nn.Linear(x_train.shape[1], width), nn.ReLU(), nn.Linear(width, 1))
    optimizer = torch.optim.Adam(net.parameters(), lr=trial.suggest_float("rate", 1e-4, 1e-1, log=True))
    loader = AdaptiveDataLoader(TensorDataset(x_train, y_train), batch_size=32, shuffle=True)
    model = AdaptiveDataParallel(net, optimizer)
    accuracy = 0.0
    for epoch in remaining_epochs_until(15):
        model.train()
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.binary_cross_entropy_with_logits(model(x)[:, 0], y).backward()
            optimizer.step()
        model.eval()
        with torch.no_grad():
            accuracy = float(((net(x_valid)[:, 0] > 0) == (y_valid > 0)).float().mean())
        trial.report(accuracy, epoch)
        if trial.should_prune():
            raise optuna.TrialPruned
    return accuracy


def objective(trial: Any) -> float:
    return boosted(trial) if trial.suggest_categorical("model", ["boosted", "network"]) == "boosted" else network(trial)


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--trials", type=int, default=12)
    parser.add_argument("--slots", type=int, default=2)
    given = parser.parse_args()
    study = optuna.create_study(direction="maximize", sampler=optuna.samplers.TPESampler(seed=0))
    optimize(study, objective, given.trials, n_jobs=2, slots=given.slots, live=True)
    print(f"best: accuracy {study.best_value:.3f} with {study.best_params}")


if __name__ == "__main__":
    main()
