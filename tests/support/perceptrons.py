"""Small models, and their training over any reduction."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import Dataset

from dist_core import AdaptiveDataLoader, AdaptiveDataParallel, remaining_epochs_until
from dist_core.trial.current import get_core, reset_core

SAMPLES = 70


class Points(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(3)
        self.x = torch.randn(SAMPLES, 8, generator=generator)
        self.y = torch.randint(4, (SAMPLES,), generator=generator)

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.x[index], self.y[index]


class Perceptron(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 40), nn.Tanh(), nn.Linear(40, 33), nn.Tanh(), nn.Linear(33, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layers(x)
        return out


class WithUnused(Perceptron):
    """One layer takes part on some batches only, one never."""

    def __init__(self) -> None:
        super().__init__()
        self.sometimes = nn.Linear(8, 4)
        self.never = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = super().forward(x)
        for_these = (x[:, :1] > 1.0).float()
        return out + self.sometimes(x) * for_these if bool(for_these.any()) else out


class Tied(nn.Module):
    """Encoder and decoder share a matrix; the middle is recomputed in the backward pass; one parameter is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.encode = nn.Linear(8, 16, bias=False)
        self.middle = nn.Sequential(nn.Linear(16, 16), nn.Tanh())
        self.head = nn.Linear(8, 4)
        self.frozen = nn.Parameter(torch.ones(8), requires_grad=False)
        self.calls: torch.Tensor
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        hidden = checkpoint(self.middle, self.encode(x * self.frozen), use_reentrant=False)
        out: torch.Tensor = self.head(hidden @ self.encode.weight)
        return out


MODELS: dict[str, Callable[[], nn.Module]] = {"perceptron": Perceptron, "unused": WithUnused, "tied": Tied}


def train(
    model_name: str, reduction: Any, batch: int, clip: bool = False, place: str = "cpu", **options: Any
) -> list[float]:
    """Weights after three epochs; the last batch of each is smaller than the others, and uneven over the replicas."""
    rank = int(os.environ.get("RANK", "0"))
    # Two replicas a node, for strategies that care.
    socket.gethostname = lambda: f"node-{rank // 2}"
    reset_core()
    torch.manual_seed(0)
    model = MODELS[model_name]().to(place)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02 * batch, momentum=0.5, weight_decay=1e-4)
    loader = AdaptiveDataLoader(Points(), batch_size=batch, shuffle=True)
    wrapped = AdaptiveDataParallel(
        model, optimizer, reduction=reduction, find_unused_parameters=model_name == "unused", **options
    )
    for _ in remaining_epochs_until(3):
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(wrapped(x.to(place)), y.to(place)).backward()
            if clip:
                nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
    assert get_core().broken is None
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()]).tolist()
