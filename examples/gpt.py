"""Tune a small GPT whose trials take two or four slots each: models that are too large for one.

    python examples/gpt.py                   the scheduler chooses: two slots a replica or four, sharded or in stages
    python examples/gpt.py --slots 4         four slots
    python examples/gpt.py --how sharded     weights divided among the slots, never stages

It learns to add: texts such as "27+58=085", character by character. Models of this size need no second slot; the code
of one that does is the same.
"""

from __future__ import annotations

import argparse
import os

import optuna
import torch
from torch import nn
from torch.utils.data import TensorDataset

from dist_core import Accumulator, AdaptiveDataLoader, ElasticModel, remaining_epochs_until
from tuner_bridge import optimize

EPOCHS = int(os.environ.get("GPT_EPOCHS", "4"))
SAMPLES = int(os.environ.get("GPT_SAMPLES", "2048"))
CHARACTERS = "0123456789+=;"
LENGTH = 10


def sums(count: int, seed: int) -> TensorDataset:
    """Texts of additions, and the same ones a character later."""
    generator = torch.Generator().manual_seed(seed)
    first, second = torch.randint(0, 100, (2, count), generator=generator).tolist()
    lines = [f"{a:02d}+{b:02d}={a + b:03d};"[:LENGTH] for a, b in zip(first, second, strict=True)]
    codes = torch.tensor([[CHARACTERS.index(each) for each in line] for line in lines])
    return TensorDataset(codes[:, :-1], codes[:, 1:])


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, 4, batch_first=True)
        self.mlp = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        later = torch.triu(torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device), 1)
        y = self.norm(x)
        x = x + self.attention(y, y, y, attn_mask=later, need_weights=False)[0]
        out: torch.Tensor = x + self.mlp(x)
        return out


class Embedding(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.characters = nn.Embedding(len(CHARACTERS), width)
        self.places = nn.Parameter(0.02 * torch.randn(LENGTH, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.characters(x) + self.places[: x.shape[1]]
        return out


def gpt(width: int, layers: int) -> nn.Sequential:
    return nn.Sequential(
        Embedding(width), *(Block(width) for _ in range(layers)), nn.LayerNorm(width), nn.Linear(width, len(CHARACTERS))
    )


def loss_of(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(output.flatten(0, 1), target.flatten())


def objective(trial: optuna.Trial) -> float:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = gpt(trial.suggest_int("width", 32, 64, step=16), trial.suggest_int("layers", 2, 6))
    optimizer = torch.optim.AdamW(model.parameters(), lr=trial.suggest_float("lr", 3e-4, 1e-2, log=True))
    train, test = sums(SAMPLES, seed=1), sums(256, seed=2)
    loader = AdaptiveDataLoader(train, batch_size=32, shuffle=True)
    layouts = os.environ.get("GPT_HOW", "sharded stages").split()
    wrapped = ElasticModel(model, optimizer, loss_of, example=train[:2][0], layouts=layouts)
    print(wrapped.explain(), flush=True)
    error = float("inf")
    for epoch in remaining_epochs_until(EPOCHS):
        for x, y in loader:
            optimizer.zero_grad()
            wrapped.step(x, y)
            optimizer.step()
        wrapped.eval()
        totals = Accumulator()
        with torch.no_grad():
            for x, y in AdaptiveDataLoader(test, batch_size=64):
                totals["loss"] += float(loss_of(wrapped(x), y)) * len(x)
                totals["count"] += len(x)
        wrapped.train()
        with totals.synchronized():
            error = totals["loss"] / totals["count"]
        trial.report(error, epoch)
        if trial.should_prune():
            raise optuna.TrialPruned
    return error


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=6)
    parser.add_argument("--slots", type=int, nargs="+", default=[2, 4], help="of a replica; several to choose from")
    parser.add_argument("--how", choices=("stages", "sharded"), nargs="+", default=["sharded", "stages"])
    arguments = parser.parse_args()
    study = optuna.create_study(
        study_name="gpt",
        direction="minimize",
        sampler=optuna.samplers.TPESampler(seed=0),
        pruner=optuna.pruners.MedianPruner(n_startup_trials=2),
    )
    optimize(
        study,
        objective,
        n_trials=arguments.trials,
        n_jobs=2,
        slots=4,
        slots_per_replica=arguments.slots,
        environ={"GPT_HOW": " ".join(arguments.how)},
        state_dir="elastune-gpt",
    )
    print(f"best: {study.best_value:.4f} with {study.best_params}")


if __name__ == "__main__":
    main()
