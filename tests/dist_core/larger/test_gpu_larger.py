"""Models of several GPUs: each process on one of its own, over NCCL."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from torch import nn

from dist_core import AdaptiveDataLoader, remaining_epochs_until
from dist_core.larger.pipeline import ElasticPipeline
from dist_core.larger.sharded import ElasticFullyShard
from dist_core.trial.current import get_core
from tests.dist_core.larger.test_pipeline import Stack, samples
from tests.support.gpus import settle_on_a_place, two_gpus
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.gpu


def train(members: int, how: str, schedule: str = "1f1b") -> dict[str, Any]:
    place = settle_on_a_place(shared=False)
    os.environ["ELASTUNE_MEMBERS"] = str(members)
    model = Stack().to(place)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    wrapped: ElasticPipeline | ElasticFullyShard
    if how == "pipeline":
        example = torch.zeros(2, 6, device=place)
        wrapped = ElasticPipeline(
            model, optimizer, nn.functional.mse_loss, example=example, schedule=schedule, noise_every=1
        )
    else:
        wrapped = ElasticFullyShard(model, optimizer, noise_every=1)
    for _ in remaining_epochs_until(3):
        for x, y in AdaptiveDataLoader(samples(), batch_size=10, shuffle=True):
            optimizer.zero_grad()
            x, y = x.to(place), y.to(place)
            if isinstance(wrapped, ElasticPipeline):
                wrapped.step(x, y)
            else:
                nn.functional.mse_loss(wrapped(x), y).backward()
            optimizer.step()
    wrapped.eval()
    with torch.no_grad():
        output = wrapped(torch.ones(5, 6, device=place))
    return {"output": output.flatten().tolist(), "steps": get_core().position.steps}


@pytest.fixture(scope="module")
def alone() -> dict[str, Any]:
    found: dict[str, Any] = run_ranks(train, 1, 1, "sharded")[0]
    return found


@two_gpus
@pytest.mark.parametrize("how", ["sharded", "pipeline"])
@pytest.mark.parametrize("members", [1, 2])
def test_it_trains_on_gpus_as_one_process(alone: dict[str, Any], how: str, members: int) -> None:
    for result in run_ranks(train, 2, members, how):
        assert result["steps"] == alone["steps"]
        assert result["output"] == pytest.approx(alone["output"], abs=1e-3)


@two_gpus
@pytest.mark.parametrize("schedule", ["simple", "interleaved"])
def test_other_schedules_do_too(alone: dict[str, Any], schedule: str) -> None:
    for result in run_ranks(train, 2, 2, "pipeline", schedule):
        assert result["output"] == pytest.approx(alone["output"], abs=1e-3)


def test_one_gpu_trains_whole(alone: dict[str, Any]) -> None:
    [result] = run_ranks(train, 1, 1, "pipeline")
    assert result["output"] == pytest.approx(alone["output"], abs=1e-3)
