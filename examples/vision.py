"""Tune a small residual network on images that all trials share: they are made once, and read from one copy.

    python examples/vision.py [--trials 6] [--slots 2]

The images are drawn here: a disc, a ring, a square or a cross somewhere on a noisy ground.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

import numpy as np
import optuna
import torch
from torch import nn
from torch.utils.data import Subset

from dist_core import Accumulator, AdaptiveDataLoader, AdaptiveDataParallel, prepared, remaining_epochs_until
from dist_core.preparation.prepare import Part
from tuner_bridge import optimize

EPOCHS, TRAINED, HELD_OUT = 4, 1600, 400


def draw(part: Part, side: int, noise: float) -> Iterator[dict[str, Any]]:
    rows, columns = np.mgrid[:side, :side]
    for number in part.of(TRAINED + HELD_OUT):
        generator = np.random.default_rng(number)
        y, x = generator.uniform(side / 4, 3 * side / 4, 2)
        distance = np.hypot(rows - y, columns - x)
        across, along = np.abs(rows - y), np.abs(columns - x)
        square, cross = np.maximum(across, along) < 4.5, np.minimum(across, along) < 1
        shapes = (distance < 5, np.abs(distance - 5) < 1.5, square, cross)
        label = int(generator.integers(len(shapes)))
        image = 0.6 * shapes[label] + noise * generator.standard_normal((side, side)) + 0.2
        yield {"image": (image * 255).clip(0, 255).astype(np.uint8)[None], "label": label}


class Residual(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.inside = nn.Sequential(
            nn.Conv2d(channels, channels, 3, padding=1),
            nn.GroupNorm(4, channels),
            nn.ReLU(),
            nn.Conv2d(channels, channels, 3, padding=1),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x + self.inside(x))


def network(channels: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, channels, 3, stride=2, padding=1),
        Residual(channels),
        nn.Conv2d(channels, channels, 3, stride=2, padding=1),
        Residual(channels),
        nn.AdaptiveMaxPool2d(1),
        nn.Flatten(),
        nn.Linear(channels, 4),
    )


def objective(trial: optuna.Trial) -> float:
    torch.manual_seed(0)
    images: Any = prepared("shapes", draw, arguments={"side": 24, "noise": 0.25})
    net = network(trial.suggest_categorical("channels", [8, 16, 32]))
    rate = trial.suggest_float("rate", 1e-4, 3e-2, log=True)
    decay = trial.suggest_float("decay", 1e-4, 0.1, log=True)
    optimizer = torch.optim.AdamW(net.parameters(), rate, weight_decay=decay)
    loader = AdaptiveDataLoader(Subset(images, range(TRAINED)), batch_size=32, shuffle=True)
    valid = AdaptiveDataLoader(Subset(images, range(TRAINED, TRAINED + HELD_OUT)), batch_size=100)
    model = AdaptiveDataParallel(net, optimizer)
    accuracy = 0.0
    for epoch in remaining_epochs_until(EPOCHS):
        model.train()
        for batch in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(batch["image"] / 255), batch["label"]).backward()
            optimizer.step()
        model.eval()
        counts = Accumulator()
        with torch.no_grad():
            for batch in valid:
                counts["right"] += int((model(batch["image"] / 255).argmax(1) == batch["label"]).sum())
                counts["all"] += len(batch["label"])
        with counts.synchronized():
            accuracy = counts["right"] / counts["all"]
        trial.report(accuracy, epoch)
        if trial.should_prune():
            raise optuna.TrialPruned
    return accuracy


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--trials", type=int, default=6)
    parser.add_argument("--slots", type=int, default=2)
    given = parser.parse_args()
    study = optuna.create_study(direction="maximize", sampler=optuna.samplers.TPESampler(seed=0))
    optimize(study, objective, n_trials=given.trials, n_jobs=given.slots, slots=given.slots, timeline="vision-slots")
    print(f"best: accuracy {study.best_value:.3f} with {study.best_params}")


if __name__ == "__main__":
    main()
