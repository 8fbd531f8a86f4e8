"""Population based training: eight networks train side by side, and the worst go on from the best.

    python examples/population.py [--size 8] [--slots 2]

The learning rate, the momentum and the weight decay of a network change while it trains. Each stretch of four epochs is
a trial of the study; the table at the end shows where the best network came from.
"""

from __future__ import annotations

import argparse

import optuna
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset

from dist_core import AdaptiveDataLoader, AdaptiveDataParallel, remaining_epochs_until
from tuner_bridge import Population, optimize


def objective(trial: optuna.Trial) -> float:
    torch.manual_seed(0)
    digits, answers = (torch.as_tensor(each) for each in load_digits(return_X_y=True))
    digits = digits.float() / 16
    net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.SGD(
        net.parameters(),
        lr=trial.suggest_float("lr", 1e-4, 1.0, log=True),
        momentum=trial.suggest_float("momentum", 0.0, 0.95),
        weight_decay=trial.suggest_float("weight_decay", 1e-6, 1e-2, log=True),
    )
    loader = AdaptiveDataLoader(TensorDataset(digits[:1500], answers[:1500]), batch_size=30, shuffle=True)
    model = AdaptiveDataParallel(net, optimizer)
    accuracy = 0.0
    for epoch in remaining_epochs_until(16):
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
        with torch.no_grad():
            accuracy = float((net(digits[1500:]).argmax(1) == answers[1500:]).float().mean())
        trial.report(accuracy, epoch)
    return accuracy


def lineage(study: optuna.Study) -> list[optuna.trial.FrozenTrial]:
    """The best trial and those that it goes back to, oldest first."""
    found = [study.best_trial]
    while "elastune:parent" in found[0].user_attrs:
        found.insert(0, study.trials[found[0].user_attrs["elastune:parent"]])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--size", type=int, default=8)
    parser.add_argument("--slots", type=int, default=2)
    given = parser.parse_args()

    study = optuna.create_study(direction="maximize", sampler=optuna.samplers.RandomSampler(seed=0))
    population = Population(size=given.size, every="4 epochs", seed=0)
    optimize(study, objective, population=population, slots=given.slots, timeline="population")
    print(f"{len(study.trials)} stretches, best: accuracy {study.best_value:.3f}, which came from")
    for each in lineage(study):
        steps = sorted(each.intermediate_values)
        print(
            f"  trial {each.number:2d}, member {each.user_attrs['elastune:member']}, epochs {steps[0]} to {steps[-1]}: "
            f"accuracy {each.value:.3f}, lr {each.params['lr']:.4f}, momentum {each.params['momentum']:.2f}"
        )


if __name__ == "__main__":
    main()
