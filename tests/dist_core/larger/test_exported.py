"""Stages of a traced model: what its own code gives to blocks goes along, and what a trace cannot know is refused."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from torch import nn

from dist_core import AdaptiveDataLoader, remaining_epochs_until
from dist_core.errors import InvalidTraining
from dist_core.larger.exported import exported_modules
from dist_core.larger.pipeline import ElasticPipeline
from dist_core.larger.stages import blocks_of, finest
from tests.support.ranks import run_ranks

WIDTH, SAMPLES = 8, 40


class Masks(nn.Module):
    """Each block gets a mask that the model makes of its inputs."""

    def __init__(self, drop: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.words = nn.Embedding(10, WIDTH)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(6))
        self.drop = nn.Dropout(drop)
        self.out = nn.Linear(WIDTH, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = (x > 2).float().unsqueeze(-1)
        y = self.words(x)
        for block in self.blocks:
            y = y + torch.tanh(block(y)) * mask
        found: torch.Tensor = self.out(self.drop(y))
        return found


class OfOneSize(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.second(self.first(x).reshape(2, -1).reshape(-1, 4))
        return found + torch.arange(x.shape[0]).unsqueeze(-1) * int(x.shape[0])


class Attends(nn.Module):
    """Its attention drops only while it trains, as in published language models."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(x)
        y = nn.functional.scaled_dot_product_attention(y, y, y, dropout_p=0.5 if self.training else 0.0)
        found: torch.Tensor = self.second(y)
        return found


class Doubles(Attends):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.second(self.first(x))
        return found * 2 if self.training else found


class Turns(Attends):
    """Rotates by complex numbers, which are made before the first cut and used behind it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        turned = torch.polar(torch.ones_like(x), x)
        found: torch.Tensor = self.second(self.first(x) * turned.imag) * turned.real
        return found


def data() -> torch.utils.data.TensorDataset:
    generator = torch.Generator().manual_seed(2)
    return torch.utils.data.TensorDataset(
        torch.randint(10, (SAMPLES, 5), generator=generator), torch.randn(SAMPLES, 5, 3, generator=generator)
    )


def train(members: int, recompute: bool = False) -> dict[str, Any]:
    os.environ["ELASTUNE_MEMBERS"] = str(members)
    model = Masks()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    wrapped = ElasticPipeline(
        model,
        optimizer,
        nn.functional.mse_loss,
        example=torch.zeros(2, 5, dtype=torch.long),
        split="export",
        recompute=recompute,
    )
    for _ in remaining_epochs_until(3):
        for x, y in AdaptiveDataLoader(data(), batch_size=8, shuffle=True):
            optimizer.zero_grad()
            wrapped.step(x, y)
            wrapped.clip_grad_norm_(1.0)
            optimizer.step()
    wrapped.eval()
    with torch.no_grad():
        output = wrapped(torch.arange(10).reshape(2, 5))
    names = [name for stage in wrapped.stages for name, _ in stage.named_parameters()]
    return {"output": output.flatten().tolist(), "names": names}


@pytest.mark.parametrize(("world_size", "members", "recompute"), [(2, 2, False), (3, 3, True), (4, 2, False)])
def test_it_trains_as_one_process(world_size: int, members: int, recompute: bool) -> None:
    [alone] = run_ranks(train, 1, 1)
    results = run_ranks(train, world_size, members, recompute)
    for result in results:
        assert result["output"] == pytest.approx(alone["output"], abs=1e-4)
    assert sorted(name for result in results[:members] for name in result["names"]) == sorted(alone["names"])


def refused() -> dict[str, str]:
    os.environ["ELASTUNE_MEMBERS"] = "2"
    words = torch.zeros(2, 5, dtype=torch.long)
    numbers = torch.zeros(2, 4)
    found = {}
    for name, model, options in (
        ("a copy", Masks(), {"example": words}),
        ("dropout", Masks(0.5), {"example": words, "split": "export"}),
        ("size", OfOneSize(), {"example": numbers, "split": "export"}),
        ("attention", Attends().eval(), {"example": torch.randn(2, 4, 4), "split": "export"}),
        ("attention that trains", Attends(), {"example": torch.randn(2, 4, 4), "split": "export"}),
        ("evaluation", Doubles(), {"example": numbers + 1.0, "split": "export"}),
        ("training", Doubles().eval(), {"example": numbers + 1.0, "split": "export"}),
        ("nothing to trace with", Masks(), {"cuts": ["blocks.3"], "split": "export"}),
        ("word", Masks(), {"example": words, "split": "halves"}),
    ):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        arguments: dict[str, Any] = dict(options)
        try:
            ElasticPipeline(model, optimizer, nn.functional.mse_loss, **arguments)
        except InvalidTraining as error:
            found[name] = str(error)
    return found


def test_what_a_trace_or_a_copy_does_not_know_is_refused() -> None:
    for told in run_ranks(refused, 2):
        assert "the stages of Masks do not compute what it does" in told["a copy"]
        assert "split='export', which sends whatever is needed" in told["a copy"]
        assert "computes otherwise when it is evaluated (dropout" in told["dropout"]
        assert "OfOneSize" in told["size"]
        assert "when it is trained" in told["attention"] and "when it is trained" in told["training"]
        assert "when it is evaluated" in told["attention that trains"] and "when it is evaluated" in told["evaluation"]
        assert "give example=" in told["nothing to trace with"]
        assert "split is 'halves'; choose 'copy' or 'export'" in told["word"]


def traced(model: nn.Module, example: torch.Tensor) -> list[nn.Module]:
    found = finest(model, blocks_of(model))
    return exported_modules(model, found, example, range(len(found.stages)))


def test_complex_numbers_go_from_stage_to_stage_as_they_are() -> None:
    model, x = Turns(), torch.randn(3, 4)
    values: Any = x
    for stage in traced(model, torch.randn(2, 4)):
        values = stage(*values) if isinstance(values, tuple) else stage(values)
        assert not any(each.is_complex() for each in (values if isinstance(values, tuple) else (values,)))
    torch.testing.assert_close(values, model(x))
