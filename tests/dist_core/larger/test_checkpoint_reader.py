"""Checkpoints of trials, read by torch.distributed.checkpoint into models of any shape."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.fsdp import fully_shard

from dist_core import (
    AdaptiveDataLoader,
    AdaptiveDataParallel,
    CheckpointReader,
    ElasticFullyShard,
    ElasticPipeline,
    remaining_epochs_until,
)
from dist_core.errors import InvalidCheckpoint
from dist_core.torch_private import RELEASE
from dist_core.trial.current import get_core
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 17), nn.Tanh(), nn.BatchNorm1d(17), nn.Linear(17, 9), nn.Tanh(), nn.Linear(9, 3))


def train(folder: str, members: int, kind: str) -> dict[str, Any]:
    """Its weights when it wrote its checkpoint."""
    os.environ["ELASTUNE_MEMBERS"] = str(members)
    os.environ["ELASTUNE_CHECKPOINT_DIR"] = folder
    torch.manual_seed(2)
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    wrapped: Any
    if kind == "stages":
        wrapped = ElasticPipeline(model, optimizer, nn.functional.mse_loss, example=torch.zeros(2, 6), microbatches=2)
    else:
        wrapped = {"whole": AdaptiveDataParallel, "sharded": ElasticFullyShard}[kind](model, optimizer)
    data = torch.utils.data.TensorDataset(torch.randn(32, 6), torch.randn(32, 3))
    for _ in remaining_epochs_until(1):
        for x, y in AdaptiveDataLoader(data, batch_size=16):
            optimizer.zero_grad()
            if kind == "stages":
                wrapped.step(x, y)
            else:
                nn.functional.mse_loss(wrapped(x), y).backward()
            optimizer.step()
        get_core().saving.save(leaving=False, wait=True)
    full = wrapped.full_state_dict() if kind != "whole" else model.state_dict()
    return {name: each.tolist() for name, each in full.items()}


def read(folder: str) -> dict[str, Any]:
    """Into a model that is sharded as this process group is; the one that torch's own fully_shard makes."""
    dist.init_process_group("gloo")
    model: Any = network()
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    weights = model.state_dict()
    load(weights, storage_reader=CheckpointReader(folder))
    model.load_state_dict(weights)
    full = {
        name: each.full_tensor() if hasattr(each, "full_tensor") else each for name, each in model.state_dict().items()
    }
    return {name: each.tolist() for name, each in full.items()}


@pytest.mark.parametrize(("kind", "members"), [("whole", 1), ("sharded", 3), ("stages", 2)])
def test_weights_go_into_models_of_another_shape(tmp_path: Path, kind: str, members: int) -> None:
    written = run_ranks(train, members, str(tmp_path), members, kind)[0]
    fresh = network()
    weights = fresh.state_dict()
    load(weights, storage_reader=CheckpointReader(tmp_path))
    assert {name: each.tolist() for name, each in weights.items()} == written
    fresh.load_state_dict(weights)
    assert run_ranks(read, 2, str(tmp_path)) == [written, written]


def test_what_is_not_there_is_said(tmp_path: Path) -> None:
    weights = network().state_dict()
    with pytest.raises(InvalidCheckpoint, match="contains no valid checkpoint"):
        CheckpointReader(tmp_path).read_metadata()
    with pytest.raises(CheckpointException) as raised:
        load(weights, storage_reader=CheckpointReader(tmp_path))
    # Before torch 2.13 a reader's own words are lost.
    assert RELEASE < (2, 13) or "contains no valid checkpoint" in str(raised.value)
    run_ranks(train, 1, str(tmp_path), 1, "whole")
    with pytest.raises(InvalidCheckpoint, match=r"model is 'critic' but .* has model-0; choose"):
        CheckpointReader(tmp_path, "critic").read_metadata()
