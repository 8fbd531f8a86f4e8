"""A sweep as its user starts it: python sweep.py TRIALS JOBS, in the folder that holds it."""

from __future__ import annotations

import sys
import time

import optuna
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset

from dist_core import AdaptiveDataLoader, AdaptiveDataParallel, remaining_epochs_until
from tuner_bridge import optimize

EPOCHS = 20


def objective(trial: optuna.Trial) -> float:
    images, labels = load_digits(return_X_y=True)
    x, y = torch.tensor(images / 16.0, dtype=torch.float32), torch.tensor(labels)
    torch.manual_seed(0)
    width = trial.suggest_int("width", 16, 64, log=True)
    model: nn.Module = nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=trial.suggest_float("lr", 1e-2, 0.5, log=True))
    loader = AdaptiveDataLoader(TensorDataset(x[:1437], y[:1437]), batch_size=32, shuffle=True)
    loader.autoscale_batch_size(128, local_bsz_bounds=(8, 32))
    model = AdaptiveDataParallel(model, optimizer)
    accuracy = 0.0
    for epoch in remaining_epochs_until(EPOCHS):
        for inputs, targets in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(inputs), targets).backward()
            optimizer.step()
            # As long as a step of a larger model takes on a GPU, without the work.
            time.sleep(0.04)
        with torch.no_grad():
            accuracy = (model(x[1437:]).argmax(1) == y[1437:]).float().mean().item()
        trial.report(accuracy, epoch)
    return accuracy


if __name__ == "__main__":
    study = optuna.create_study(
        study_name="digits on a cluster",
        storage="sqlite:///sweep.db",
        direction="maximize",
        sampler=optuna.samplers.RandomSampler(seed=1),
    )
    optimize(study, objective, n_trials=int(sys.argv[1]), n_jobs=int(sys.argv[2]), max_replicas=3)
