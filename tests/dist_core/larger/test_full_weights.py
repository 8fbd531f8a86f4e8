"""The weights of a divided model come out whole, by the model's own names, however they are held."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from torch import nn

from dist_core import ElasticFullyShard, ElasticModel, ElasticPipeline
from tests.support.ranks import run_ranks


class Words(nn.Module):
    """``tied``: words in and out have the same weights, and a number is kept, which a pipeline has no place for."""

    def __init__(self, *, tied: bool) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.words = nn.Embedding(7, 5)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(5, 5), nn.BatchNorm1d(5)) for _ in range(4))
        self.out = nn.Linear(5, 7)
        if tied:
            self.out.weight = self.words.weight
            self.register_buffer("scale", torch.tensor(2.0))
            self.register_buffer("scratch", torch.zeros(3), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.words(x)
        for layer in self.layers:
            x = layer(x)
        found: torch.Tensor = self.out(x)
        return found


def came_out(members: int, kind: str) -> bool | None:
    """Whether the first process is given the weights that the model was made with; None for one that is given none."""
    os.environ["ELASTUNE_MEMBERS"] = str(members)
    model = Words(tied=kind == "sharded")
    before = {name: each.clone() for name, each in model.state_dict().items()}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    example = torch.tensor([0, 1, 2])
    wrapped: Any
    if kind == "sharded":
        wrapped = ElasticFullyShard(model, optimizer)
    else:
        made: Any = ElasticPipeline if kind == "pipeline" else ElasticModel
        wrapped = made(model, optimizer, nn.functional.cross_entropy, example=example)
    found = wrapped.full_state_dict()
    if not found:
        return None
    Words(tied=kind == "sharded").load_state_dict(found)
    return found.keys() == before.keys() and all(torch.equal(found[name], each) for name, each in before.items())


@pytest.mark.parametrize(("kind", "members"), [("sharded", 1), ("sharded", 3), ("pipeline", 2), ("model", 2)])
def test_they_are_whole_on_the_first_process_and_nowhere_else(kind: str, members: int) -> None:
    assert run_ranks(came_out, members, members, kind) == [True] + [None] * (members - 1)
