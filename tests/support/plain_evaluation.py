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
    held_out = kit.loader(numbered(20), 4)
    for wrapped, optimizer, train in _trainings(kit, epochs):
        wrapped.train()
        for x, y in train:
            _step(wrapped, optimizer, x, y)
        wrapped.eval()
        yield wrapped, held_out


def _trainings(kit: Any, epochs: int = EPOCHS) -> Any:
    """Model, optimizer and loader of each epoch."""
    model = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    train, wrapped = kit.loader(numbered(), 6), kit.wrap(model, optimizer)
    for _ in kit.epochs(epochs):
        yield wrapped, optimizer, train


def _step(wrapped: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(wrapped(x), y)
    loss.backward()
    optimizer.step()
    return loss


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


def summed_while_training(kit: Any) -> list[float]:
    """Each epoch's mean loss in training, as the same tutorial divides it."""
    return [total / SAMPLES for total, _ in _sums_of_epochs(kit)]


def counted_while_training(kit: Any) -> list[float]:
    return [total / seen for total, seen in _sums_of_epochs(kit, counts=True)]


def _sums_of_epochs(kit: Any, *, counts: bool = False) -> Any:
    yield from _counted_sums(kit) if counts else _sums(kit)


def _sums(kit: Any) -> Any:
    for wrapped, optimizer, train in _trainings(kit):
        total = 0.0
        for x, y in train:
            loss = _step(wrapped, optimizer, x, y)
            total += loss.item() * x.size(0)
        yield total, 0


def _counted_sums(kit: Any) -> Any:
    for wrapped, optimizer, train in _trainings(kit):
        total, seen = 0.0, 0
        for x, y in train:
            total += _step(wrapped, optimizer, x, y).item() * len(x)
            seen += len(x)
        yield total, seen
