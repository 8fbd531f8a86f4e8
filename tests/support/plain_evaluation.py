"""Evaluations of scripts that know of one process only: nothing that can be read here speaks of several."""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

SAMPLES, EPOCHS = 30, 2


def numbered(samples: int = SAMPLES) -> TensorDataset:
    values = torch.arange(samples, dtype=torch.float32).unsqueeze(1)
    return TensorDataset(values, 0.1 * values)


def trained(kit: Any, totals: Any = None) -> list[float]:
    """Each epoch's validation, as PyTorch's tutorial for transfer learning divides it: by the whole size.

    Three functions lie around the loop, as many as are looked at: what calls them does know of several processes.
    """
    return _train(kit, totals)


def _train(kit: Any, totals: Any) -> list[float]:
    return [_mean_loss(wrapped, held_out, totals) for wrapped, held_out in _epochs(kit, EPOCHS)]


def _epochs(kit: Any, epochs: int) -> Any:
    """The model after each epoch, and samples that were held out."""
    model = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    train, held_out = kit.loader(numbered(), 6), kit.loader(numbered(20), 4)
    wrapped = kit.wrap(model, optimizer)
    for _ in kit.epochs(epochs):
        wrapped.train()
        for x, y in train:
            optimizer.zero_grad()
            nn.functional.mse_loss(wrapped(x), y).backward()
            optimizer.step()
        wrapped.eval()
        yield wrapped, held_out


def _mean_loss(model: nn.Module, held_out: Any, totals: Any) -> float:
    loss = 0.0
    with torch.no_grad():
        for x, y in held_out:
            loss += nn.functional.mse_loss(model(x), y).item() * len(x)
    return loss / len(held_out.dataset)


def summed_in_secret(kit: Any) -> list[float]:
    """Means of two evaluations, each put together by a collective that only shows when it is made."""
    return [_summed(kit, _mean_loss(model, held_out, None)) for model, held_out in _epochs(kit, 1) for _ in range(2)]


def _summed(kit: Any, number: float) -> float:
    total = torch.tensor(number, dtype=torch.float64)
    if kit.elastic:
        importlib.import_module("torch.distributed").all_reduce(total)
    return float(total)
