"""A member of a population as `populations` measures it: Ray's example problem, and so many megabytes of state."""

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

from benchmarks.peers.moving_optimum import HIGHEST_RATE, LOWEST_RATE, step
from dist_core import AdaptiveDataLoader, AdaptiveDataParallel, register_state, remaining_epochs_until
from dist_core.state.states import FunctionState


def objective(trial: optuna.Trial) -> float:
    problem = json.loads(os.environ["PROBLEM"])
    rate = trial.suggest_float("lr", LOWEST_RATE, HIGHEST_RATE)
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
            accuracy = step(accuracy, rate, random)
            trace.write(json.dumps([epoch, began, time.time()]) + "\n")
            trial.report(accuracy, epoch)
    return accuracy
