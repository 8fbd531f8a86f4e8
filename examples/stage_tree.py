"""A stage tree: sixteen trials that differ only in how their rate decays train the epochs before that once.

    python examples/stage_tree.py [--alone]

The decay matters from the eighth of sixteen epochs on. With --alone each trial trains all epochs itself; its value is
the same, to rounding.
"""

from __future__ import annotations

import argparse

import optuna
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset

from dist_core import AdaptiveDataLoader, AdaptiveDataParallel, remaining_epochs_until
from tuner_bridge import optimize, stage

EPOCHS, SHARED = 16, 8
DECAYS = [round(0.02 + 0.06 * index, 2) for index in range(16)]


def alone(trial: optuna.Trial) -> float:
    torch.manual_seed(0)
    digits, answers = (torch.as_tensor(each) for each in load_digits(return_X_y=True))
    digits = digits.float() / 16
    net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    loader = AdaptiveDataLoader(TensorDataset(digits[:1500], answers[:1500]), batch_size=30, shuffle=True)
    model = AdaptiveDataParallel(net, optimizer)
    loss = 0.0
    for epoch in remaining_epochs_until(EPOCHS):
        if epoch >= SHARED:
            decay = trial.suggest_categorical("decay", DECAYS)
            optimizer.param_groups[0]["lr"] = 0.1 * decay ** (epoch - SHARED + 1)
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
        with torch.no_grad():
            loss = float(nn.functional.cross_entropy(net(digits[1500:]), answers[1500:]))
        trial.report(loss, epoch)
    return loss


@stage("decay", from_epoch=SHARED)
def objective(trial: optuna.Trial) -> float:
    return alone(trial)


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--alone", action="store_true")
    given = parser.parse_args()
    study = optuna.create_study(sampler=optuna.samplers.GridSampler({"decay": DECAYS}, seed=0))
    chosen = alone if given.alone else objective
    optimize(study, chosen, n_trials=len(DECAYS), n_jobs=8, slots=2, max_replicas=1, timeline="stage-tree")
    shared = sum(trial.user_attrs.get("elastune:shared_epochs", 0) for trial in study.trials)
    asked = EPOCHS * len(study.trials)
    print(f"{asked - shared} epochs trained of {asked}, best: loss {study.best_value:.6f} with {study.best_params}")
    for trial in sorted(study.trials, key=lambda each: each.params["decay"]):
        parent = trial.user_attrs.get("elastune:parent")
        print(
            f"  decay {trial.params['decay']:.2f}: loss {trial.value:.6f}"
            + ("" if parent is None else f", behind trial {parent}'s first {SHARED} epochs")
        )


if __name__ == "__main__":
    main()
