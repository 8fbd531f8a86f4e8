"""A study with a deadline, or with a budget: the scheduler gives its slots so that the best result is there in time.

    python examples/deadline.py [--seconds 20] [--slots 2]
    python examples/deadline.py --budget 0.008      slot hours: half a minute of one slot

No trial begins behind the deadline; those that run then end as they would. A budget ends the sweep when it is used.
"""

from __future__ import annotations

import argparse
import time

import optuna
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset

from dist_core import AdaptiveDataLoader, AdaptiveDataParallel, remaining_epochs_until
from tuner_bridge import StudyTerms, optimize


def objective(trial: optuna.Trial) -> float:
    torch.manual_seed(0)
    digits, answers = (torch.as_tensor(each) for each in load_digits(return_X_y=True))
    digits = digits.float() / 16
    width = trial.suggest_int("width", 32, 512, log=True)
    net = nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10))
    optimizer = torch.optim.Adam(net.parameters(), lr=trial.suggest_float("lr", 1e-4, 3e-2, log=True))
    loader = AdaptiveDataLoader(TensorDataset(digits[:1500], answers[:1500]), batch_size=30, shuffle=True)
    model = AdaptiveDataParallel(net, optimizer)
    accuracy = 0.0
    for epoch in remaining_epochs_until(12):
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
        with torch.no_grad():
            accuracy = float((net(digits[1500:]).argmax(1) == answers[1500:]).float().mean())
        trial.report(accuracy, epoch)
        if trial.should_prune():
            raise optuna.TrialPruned
    return accuracy


def study_named(name: str) -> optuna.Study:
    pruner = optuna.pruners.SuccessiveHalvingPruner(min_resource=2)
    sampler = optuna.samplers.TPESampler(seed=0)
    return optuna.create_study(study_name=name, direction="maximize", sampler=sampler, pruner=pruner)


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--budget", type=float, help="slot hours, in place of seconds")
    parser.add_argument("--slots", type=int, default=2)
    given = parser.parse_args()

    study, began = study_named("hurried"), time.monotonic()
    if given.budget is None:
        limit, seconds = "deadline", given.seconds
        terms = StudyTerms(goal="deadline", deadline_at=time.time() + seconds)
    else:
        limit, seconds = "budget", None
        terms = StudyTerms(budget_slot_hours=given.budget)
    optimize(study, objective, timeout=seconds, n_jobs=given.slots, slots=given.slots, terms=terms)
    took = time.monotonic() - began
    finished = study.get_trials(deepcopy=False, states=[optuna.trial.TrialState.COMPLETE])
    best = f"accuracy {study.best_value:.3f}" if finished else "none finished"
    print(f"{limit}: {len(study.trials)} trials, best: {best} after {took:.0f} s")


if __name__ == "__main__":
    main()
