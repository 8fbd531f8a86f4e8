"""A trial for sweeps on emulated devices: real elastic training, whose values are those of a learning curve.

What larger batches are worth depends on the noise of its gradients: their variance at the initial batch size is 5 times
their mean's square at first, and 70 times at its end. Measurements published with Pollux (OSDI'21) have 5 to 72 for
ImageNet, whose speeds it runs at, and 0.6 to 302 for CIFAR-10.
"""

from __future__ import annotations

import os
import time
from functools import cache
from typing import Any

import numpy as np
import optuna
import torch
from torch.utils.data import TensorDataset

from dist_core import AdaptiveDataLoader, AdaptiveDataParallel, remaining_epochs_until
from dist_core.goodput import BatchBounds, GoodputModel, GradientStatistics, optim_seconds
from dist_core.goodput.speed_profiles import speed_profile
from scheduler.simulator.sweep import learning_curves

EPOCHS, STEPS, BATCH = 20, 40, 64
PROFILE = "resnet50-imagenet@3.5"
"""Profile with which a step of 64 examples on one slot takes 0.1 s, and a whole trial 80 s."""
CONFIGURATIONS = 64
FEATURES = 64
NOISE, LEARNING_RATE = 5.0, 0.0008
BOUNDS = BatchBounds(init_batch=BATCH, max_batch=1024, min_atomic=16, max_atomic=128)
FIRST_RATIO, LAST_RATIO = 5.0, 70.0
"""Gradient variance at the initial batch size over the mean's square, as measured in these trials."""


@cache
def curves() -> Any:
    return learning_curves(CONFIGURATIONS, EPOCHS, seed=int(os.environ.get("SWEEP_SEED", "0")))


def step_seconds() -> float:
    return float(optim_seconds(speed_profile(PROFILE).params, 1, 1, BATCH))


def epoch_seconds(node_slots: int, most_slots: int) -> list[list[float]]:
    """Return each epoch's seconds by number of slots (from 1), at the best batch size, for rival policies."""
    counts = np.arange(1, most_slots + 1)
    found = []
    for epoch in range(EPOCHS):
        ratio = FIRST_RATIO * (LAST_RATIO / FIRST_RATIO) ** (epoch / (EPOCHS - 1))
        model = GoodputModel(
            throughput=speed_profile(PROFILE).params,
            statistics=GradientStatistics(sqr=1.0, var=ratio),
            bounds=BOUNDS,
        )
        found.append((STEPS * BATCH / model.goodput(-(-counts // node_slots), counts)).tolist())
    return found


def configuration(trial: optuna.Trial) -> int:
    return trial.suggest_int("configuration", 0, CONFIGURATIONS - 1)


def sleeps(trial: optuna.Trial) -> float:
    """The same steps on one slot, as a thread of plain Optuna."""
    row = configuration(trial)
    for epoch in range(EPOCHS):
        time.sleep(STEPS * step_seconds())
        trial.report(float(curves()[row, epoch]), epoch + 1)
        if trial.should_prune():
            raise optuna.TrialPruned
    return float(curves()[row, -1])


def trains(trial: optuna.Trial) -> float:
    row = configuration(trial)
    generator = torch.Generator().manual_seed(row)
    x = torch.randn(STEPS * BATCH, FEATURES, generator=generator)
    y = (8.0 / FEATURES) ** 0.5 * x.sum(dim=1, keepdim=True) + NOISE * torch.randn(len(x), 1, generator=generator)
    model = torch.nn.Linear(FEATURES, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    loader = AdaptiveDataLoader(TensorDataset(x, y), batch_size=BATCH, shuffle=True)
    loader.autoscale_batch_size(BOUNDS.max_batch, local_bsz_bounds=(BOUNDS.min_atomic, BOUNDS.max_atomic))
    wrapped = AdaptiveDataParallel(model, optimizer)
    value = float(np.nan)
    for epoch in remaining_epochs_until(EPOCHS):
        for inputs, target in loader:
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(wrapped(inputs), target).backward()
            optimizer.step()
        value = float(curves()[row, epoch])
        trial.report(value, epoch + 1)
        if trial.should_prune():
            raise optuna.TrialPruned
    return value
