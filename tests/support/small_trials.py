"""Datasets, models and a loop for trials of a few steps."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn
from torch.utils.data import Dataset, IterableDataset, TensorDataset

from dist_core import AdaptiveDataLoader, AdaptiveDataParallel, remaining_epochs_until
from dist_core.trial.current import get_core, reset_core


class Numbered(Dataset[int]):
    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        return index


class ConstantGradient(nn.Module):
    """Its loss has the gradient 1 for every example: each optimizer step at rate 1 moves the weight by -1."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * torch.ones_like(x, dtype=torch.float32)


def classifier() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3))


def classes(count: int = 200) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(count, 6, generator=generator)
    return TensorDataset(x, (x[:, :3].argmax(dim=1)))


def train(loader: AdaptiveDataLoader, epochs: int, *, stop_after: int | None = None) -> list[list[int]]:
    """Samples by epoch; ``stop_after`` batches the loop is left."""
    model = ConstantGradient()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    wrapped = AdaptiveDataParallel(model, optimizer)
    seen = []
    for _ in remaining_epochs_until(epochs):
        epoch: list[int] = []
        for number, x in enumerate(loader):
            if number == stop_after:
                break
            optimizer.zero_grad()
            wrapped(x).mean().backward()
            optimizer.step()
            epoch.extend(x.tolist())
        seen.append(epoch)
    return seen


class Stream(IterableDataset[int]):
    """Numbers in an order that depends on the pass, as a shuffling stream's does."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.epoch = 0
        self.given_out = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        for number in range(self.length):
            self.given_out += 1
            yield (number + self.epoch) % self.length


def running_mean(place: torch.device) -> list[float]:
    """Of a batch norm, after a pass over examples of which each replica has seen some."""
    reset_core()
    torch.manual_seed(0)
    norm = nn.BatchNorm1d(4)
    model = nn.Sequential(norm, nn.Linear(4, 1)).to(place)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    loader = AdaptiveDataLoader(TensorDataset(torch.randn(96, 4)), batch_size=12)
    wrapped = AdaptiveDataParallel(model, optimizer)
    for _ in remaining_epochs_until(1):
        for (x,) in loader:
            optimizer.zero_grad()
            wrapped(x.to(place)).mean().backward()
            optimizer.step()
    assert norm.running_mean is not None
    return norm.running_mean.tolist()


def measured_noise(place: torch.device, *, adam: bool) -> tuple[float, float]:
    """Squared norm and variance of the gradient, as one training measures them on every step."""
    reset_core()
    torch.manual_seed(0)
    model = nn.Linear(20, 1).to(place)
    optimizer = (torch.optim.Adam if adam else torch.optim.SGD)(model.parameters(), lr=1e-3)
    loader = AdaptiveDataLoader(TensorDataset(torch.randn(960, 20)), batch_size=16)
    loader.autoscale_batch_size(17, local_bsz_bounds=(1, 17))
    wrapped = AdaptiveDataParallel(model, optimizer, noise_every=1)
    for _ in remaining_epochs_until(1):
        for (x,) in loader:
            core = get_core()
            assert core.adaptation is not None
            core.adaptation.proposal = lambda *_: None  # type: ignore[method-assign]
            optimizer.zero_grad()
            (wrapped(x.to(place)) - 1.0).square().mean().backward()
            optimizer.step()
    statistics = wrapped.statistics
    assert statistics is not None
    return statistics.sqr, statistics.var
