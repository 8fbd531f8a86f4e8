"""What cannot be trained in parts is refused before it is, with what to do instead."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from torch import nn

from dist_core.errors import InvalidTraining
from dist_core.larger.pipeline import ElasticPipeline
from dist_core.larger.schedules import schedule_kind
from dist_core.larger.sharded import ElasticFullyShard
from dist_core.link.environment import standalone_members
from dist_core.training.model import AdaptiveDataParallel
from tests.dist_core.larger.test_alike import Masked
from tests.support.ranks import run_ranks


class Tied(nn.Module):
    """The last layer has the first one's weights."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = (nn.Linear(4, 4) for _ in range(3))
        self.last.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.last(self.middle(self.first(x)))
        return out


class Between(nn.Module):
    """A parameter that lies in no block."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x) * self.scale
        return x


def piped(model: nn.Module, **options: Any) -> ElasticPipeline:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return ElasticPipeline(model, optimizer, nn.functional.mse_loss, **options)


def words_of(make: Any) -> str:
    try:
        make()
    except InvalidTraining as error:
        return str(error)
    return "nothing"


def refused() -> dict[str, str]:
    os.environ["ELASTUNE_MEMBERS"] = "2"
    plain = [nn.Linear(4, 4) for _ in range(3)]
    x = torch.zeros(2, 4)
    stepped = nn.Sequential(*plain)
    optimizer = torch.optim.Adam(stepped.parameters())
    stepped(x).sum().backward()
    optimizer.step()
    scaled = piped(nn.Sequential(*(nn.Linear(4, 4) for _ in range(2))), example=x)
    return {
        "no example": words_of(lambda: piped(nn.Sequential(*plain))),
        "between": words_of(lambda: piped(Between(), example=x)),
        "tied": words_of(lambda: piped(Tied(), cuts=["middle"])),
        "too few": words_of(lambda: piped(nn.Sequential(*plain), example=x, microbatches=1)),
        "too small": words_of(lambda: piped(nn.Sequential(*plain), example=x, memory_bytes=10.0)),
        "one block": words_of(lambda: piped(nn.Sequential(nn.Linear(4, 4)), example=x)),
        "stepped": words_of(lambda: ElasticFullyShard(stepped, optimizer)),
        "units": words_of(
            lambda: ElasticFullyShard(nn.Sequential(*plain), torch.optim.SGD(plain[0].parameters(), 0.1), units=["7"])
        ),
        "forward": words_of(lambda: scaled(x)),
        "targets": words_of(lambda: scaled.step(x, (x, x))),
        "masked": words_of(lambda: piped(Masked(), example=x)),
        "scaler": words_of(lambda: scaled.part.adopt_scaler(torch.amp.GradScaler("cpu"))),
        "beside": words_of(lambda: AdaptiveDataParallel(m := nn.Linear(2, 2), torch.optim.SGD(m.parameters(), lr=0.1))),
    }


def test_each_says_what_and_what_to_do() -> None:
    for told in run_ranks(refused, 2):
        assert "give example= (a microbatch of inputs)" in told["no example"]
        assert "the parameter 'scale' belongs to no block" in told["between"]
        assert "share a parameter but are in different stages; cut elsewhere" in told["tied"]
        assert "microbatches is 1 for 2 stages" in told["too few"]
        assert "alone needs 1.76e-07 GB" in told["too small"]
        assert "1 blocks cannot be cut into 2 stages" in told["one block"]
        assert "Adam took a step before its model was divided" in told["stepped"]
        assert "units names a module that Sequential does not have" in told["units"]
        assert "Call model.step(inputs, targets)" in told["forward"]
        assert "targets are a tuple; they must be one tensor" in told["targets"]
        assert "the pipeline stages of Masked do not compute the same" in told["masked"]
        assert "Move that code into the blocks" in told["masked"]
        assert "train in bfloat16" in told["scaler"]
        assert "a pipeline was wrapped together with a model that is not a pipeline" in told["beside"]


@pytest.mark.parametrize(("name", "words"), [("2f2b", "schedule is '2f2b'"), ("interleaved", "chunks is 1")])
def test_schedules_that_do_not_exist_are_named(name: str, words: str) -> None:
    with pytest.raises(InvalidTraining, match=words):
        schedule_kind(name, 1)


def test_a_number_of_processes_has_to_be_one() -> None:
    with pytest.raises(InvalidTraining, match="ELASTUNE_MEMBERS is 'two'"):
        standalone_members({"ELASTUNE_MEMBERS": "two"})
