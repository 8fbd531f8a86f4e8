"""An objective that trains long enough for its trial to grow, and logs by itself as well."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import nn

import dist_core
from tests.support.habits import examples, network

EPOCHS = {"short": 8, "long": 40}
SECONDS = 5e-4
"""For a sample, so that two replicas are faster than one."""


def objective(trial: Any) -> float:
    import mlflow

    rate = trial.suggest_float("rate", 0.01, 0.1)
    epochs = EPOCHS[trial.suggest_categorical("kind", ["short", "long"])]
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), rate)
    wrapped = dist_core.AdaptiveDataParallel(model, optimizer)
    loader = dist_core.AdaptiveDataLoader(examples(480), 24)
    loss = torch.zeros(())
    with mlflow.start_run():
        for epoch in dist_core.remaining_epochs_until(epochs):
            for x, y in loader:
                time.sleep(SECONDS * len(x))
                optimizer.zero_grad()
                loss = nn.functional.mse_loss(wrapped(x), y)
                loss.backward()
                optimizer.step()
            trial.report(float(loss.detach()), epoch)
            if dist_core.rank() == 0:
                mlflow.log_metric("own", float(epoch), step=epoch)
    return float(loss.detach())
