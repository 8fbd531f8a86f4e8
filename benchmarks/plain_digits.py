"""The digits objective as plain PyTorch in one process: what a user has before adopting elastic trials."""

from __future__ import annotations

import optuna
import torch
from torch import nn
from torch.utils.data import DataLoader

from examples.digits import EPOCHS, digits, network


def objective(trial: optuna.Trial) -> float:
    train, x, y = digits()
    torch.manual_seed(0)
    model = network(trial.suggest_int("width", 16, 64, log=True), trial.suggest_float("dropout", 0.0, 0.5))
    optimizer = torch.optim.SGD(
        model.parameters(),
        lr=trial.suggest_float("lr", 1e-3, 0.3, log=True),
        momentum=trial.suggest_float("momentum", 0.0, 0.95),
    )
    loader = DataLoader(train, batch_size=32, shuffle=True)
    accuracy = 0.0
    for epoch in range(EPOCHS):
        model.train()
        for images, labels in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(images), labels).backward()
            optimizer.step()
        model.eval()
        with torch.no_grad():
            accuracy = (model(x).argmax(1) == y).float().mean().item()
        trial.report(accuracy, epoch)
        if trial.should_prune():
            raise optuna.TrialPruned
    return accuracy
