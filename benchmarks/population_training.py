"""Members of a population as `populations` measures them: Ray's example problem, and a small network."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import optuna
import torch
from torch.utils.data import TensorDataset

from benchmarks.peers import moving_optimum, small_convnet
from dist_core import AdaptiveDataLoader, AdaptiveDataParallel, register_state, remaining_epochs_until
from dist_core.state.states import FunctionState


def objective(trial: optuna.Trial) -> float:
    problem = json.loads(os.environ["PROBLEM"])
    return (convnet if problem["name"] == "small_convnet" else moving)(trial, problem)


def moving(trial: optuna.Trial, problem: dict[str, Any]) -> float:
    """Ray's example, with so many megabytes of state."""
    rate = trial.suggest_float("lr", moving_optimum.LOWEST_RATE, moving_optimum.HIGHEST_RATE)
    random = np.random.default_rng((problem["seed"], trial.number))
    ballast = torch.ones(problem["megabytes"] * 2**20, dtype=torch.uint8)
    accuracy = 0.0
    # Nothing is learned by it; the steps are what a trial's state is saved between.
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    loader = AdaptiveDataLoader(TensorDataset(torch.ones(4, 1)), batch_size=4)
    wrapped = AdaptiveDataParallel(model, optimizer)

    def load(state: dict[str, Any]) -> None:
        nonlocal accuracy
        accuracy = state["accuracy"]
        ballast.copy_(state["ballast"])

    register_state("member", FunctionState(lambda: {"accuracy": accuracy, "ballast": ballast}, load))
    with open(Path(os.environ["TRACE_DIR"]) / f"{trial.number}.jsonl", "a", buffering=1) as trace:
        for epoch in remaining_epochs_until(problem["epochs"]):
            began = time.time()
            time.sleep(problem["seconds"])
            for (some,) in loader:
                optimizer.zero_grad()
                wrapped(some).square().mean().backward()
                optimizer.step()
            accuracy = moving_optimum.step(accuracy, rate, random)
            trace.write(json.dumps([epoch, began, time.time()]) + "\n")
            trial.report(accuracy, epoch)
    return accuracy


def convnet(trial: optuna.Trial, problem: dict[str, Any]) -> float:
    rate = trial.suggest_float("lr", small_convnet.LOWEST_RATE, small_convnet.HIGHEST_RATE, log=True)
    train, test = small_convnet.digits()
    model = small_convnet.network(problem["seed"])
    optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9)
    loader = AdaptiveDataLoader(train, batch_size=small_convnet.BATCH, shuffle=True)
    wrapped = AdaptiveDataParallel(model, optimizer)
    accuracy = 0.0
    for epoch in remaining_epochs_until(problem["epochs"]):
        for x, y in loader:
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(wrapped(x), y).backward()
            optimizer.step()
        accuracy = small_convnet.accuracy(model, test)
        trial.report(accuracy, epoch)
    return accuracy
