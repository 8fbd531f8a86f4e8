"""Buffers that a forward pass changes and computes with, such as a codebook: one on all replicas, as under DDP."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.support.habits import GROWN, Kit, as_trial, examples, weights_of
from tests.support.ranks import run_ranks


class Codebook(nn.Module):
    """Vectors that follow the inputs that are next to them; a cache of what one replica has seen."""

    codes: torch.Tensor
    cache: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.encoder, self.decoder = nn.Linear(6, 4), nn.Linear(4, 1)
        self.register_buffer("codes", torch.randn(5, 4))
        self.register_buffer("cache", torch.zeros(0), persistent=False)
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        encoded = self.norm(self.encoder(x))
        nearest = torch.cdist(encoded, self.codes).argmin(1)
        quantized = self.codes[nearest]
        if self.training:
            self.cache = torch.zeros(int(x.abs().sum() * 100) % 7)
            with torch.no_grad():
                for index, row in zip(nearest.tolist(), encoded, strict=True):
                    self.codes[index].lerp_(row, 0.1)
        out: torch.Tensor = self.decoder(encoded + (quantized - encoded).detach())
        return out


def quantizes(kit: Kit) -> list[list[float]]:
    """The codes that each step of the last epoch begins with, and the weights it ends with."""
    model = Codebook()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    loader, wrapped = kit.loader(examples()), kit.wrap(model, optimizer)
    codes: list[list[float]] = []
    for _ in kit.epochs(3):
        codes = []
        for x, y in loader:
            codes.append(model.codes.flatten().tolist())
            optimizer.zero_grad()
            nn.functional.mse_loss(wrapped(x), y).backward()
            optimizer.step()
    return [*codes, weights_of(model)]


def one_step(kit_is_elastic: bool) -> list[list[float]]:
    return quantizes(Kit(elastic=kit_is_elastic))


@pytest.mark.parametrize("replicas", [2, GROWN])
def test_all_replicas_compute_with_the_same_codes_at_each_step(replicas: int) -> None:
    first, *others = as_trial(quantizes, replicas)
    assert len({tuple(codes) for codes in first[:-1]}) == len(first) - 1, "the codes have not moved"
    assert all(other == first for other in others)


def test_alone_nothing_is_sent() -> None:
    [alone] = run_ranks(one_step, 1, True)
    [plain] = run_ranks(one_step, 1, False)
    assert alone == plain
