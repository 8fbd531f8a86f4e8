"""Stages are told from their model by what they compute, and by nothing else."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from dist_core.errors import InvalidTraining
from dist_core.larger.alike import difference_between
from dist_core.larger.stages import blocks_of, finest, stage_modules


class Chain(nn.Module):
    def __init__(self, *parts: nn.Module) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)

    def forward(self, *values: torch.Tensor) -> Any:
        found: Any = values
        for part in self.parts:
            found = part(*found) if isinstance(found, tuple) else part(found)
        return found


class Pair(nn.Linear):
    def forward(self, x: torch.Tensor) -> Any:
        y = super().forward(x)
        return y, {"doubled": 2 * y}


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Bilinear(4, 4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.second(self.first(x), x)
        return found


class Wide(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 3), nn.Linear(6, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(x)
        found: torch.Tensor = self.second(torch.cat([y, y], dim=1))
        return found


class Fails(Masked):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise KeyError("labels")


def difference(model: nn.Module, example: torch.Tensor) -> str | None:
    names = blocks_of(model)
    found = finest(model, names)
    stages = stage_modules(model, names, found, range(len(found.stages)))
    return difference_between(model, stages, (example,))


@pytest.mark.parametrize(
    "example", [torch.randn(2, 4), torch.full((2, 4), torch.nan), torch.zeros(2, 4, device="meta")]
)
def test_a_chain_of_blocks_is_alike(example: torch.Tensor) -> None:
    norm = nn.BatchNorm1d(4)
    model = Chain(nn.Linear(4, 4), norm, nn.Dropout(0.5), Pair(4, 3)).train()
    before = torch.random.get_rng_state()
    assert difference(model, example) is None
    assert norm.running_mean is not None
    assert model.training and norm.training and not norm.running_mean.any()
    assert torch.equal(torch.random.get_rng_state(), before)


def test_a_block_that_needs_more_is_not_alike_and_a_model_that_fails_says_so() -> None:
    assert difference(Masked(), torch.randn(2, 4)) == "their outputs differ"
    told = difference(Wide(), torch.randn(2, 4))
    assert told is not None and "they fail with RuntimeError" in told
    with pytest.raises(InvalidTraining, match="Fails fails on its example input: KeyError: 'labels'"):
        difference(Fails(), torch.randn(2, 4))


def test_blocks_that_share_weights_are_one_stage() -> None:
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(6)))
    model[3].weight = model[1].weight
    stages = finest(model, blocks_of(model)).stages
    assert [[block.name for block in stage.blocks] for stage in stages] == [["0"], ["1", "2", "3"], ["4"], ["5"]]
