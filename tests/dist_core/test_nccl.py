"""Replicas on GPUs of their own: over NCCL."""

from __future__ import annotations

import os
import signal
import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import FileStore  # type: ignore[attr-defined]  # public, but not marked so
from torch.utils.data import TensorDataset

from dist_core import AdaptiveDataLoader, AdaptiveDataParallel, remaining_epochs_until
from dist_core.device import device_of
from dist_core.errors import PeerLost
from dist_core.generations.group_needs import GroupNeeds, carrier_for
from dist_core.generations.process_groups import build_group
from dist_core.trial.current import get_core, reset_core
from tests.support.gpus import EXACT, ON_CPU, assert_close, settle_on_a_place, trained, two_gpus
from tests.support.perceptrons import MODELS, train
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.gpu


@two_gpus
@pytest.mark.parametrize("reduction", EXACT)
def test_replicas_on_gpus_of_their_own_train_as_one_process_does(reduction: str, alone: Any) -> None:
    for weights in run_ranks(trained, 2, "perceptron", reduction, False, False):
        assert_close(weights, alone("perceptron"))


@two_gpus
@pytest.mark.parametrize("model", [name for name in MODELS if name != "perceptron"])
def test_models_of_any_kind_are_reduced_over_nccl(model: str, alone: Any) -> None:
    for weights in run_ranks(trained, 2, model, "all_reduce", False, False):
        assert_close(weights, alone(model))


def _generations_in_turn(meeting_place: str) -> list[float]:
    place = settle_on_a_place(shared=False)
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = FileStore(meeting_place, world_size)
    needs = GroupNeeds(carriers=frozenset({carrier_for(device_of(place))}), extra=1)
    sums = []
    before = None
    for number in range(3):
        group = build_group(
            store, name=f"g{number}", rank=rank, nodes=("here",) * world_size, timeout=timedelta(minutes=1), needs=needs
        )
        if before is not None:
            before.leave()
        group.connect()
        vector = torch.ones(10, device=place)
        group.wait(group.data.allreduce([vector]), group.data)
        sums.append(float(vector.sum()))
        before = group
    return sums


@two_gpus
def test_generations_follow_each_other_over_nccl(meeting_place: str) -> None:
    assert run_ranks(_generations_in_turn, 2, meeting_place) == [[20.0] * 3] * 2


def _loses_a_peer() -> float:
    """Seconds until the loss is known, with a number read that lies behind a sum that never ends."""
    place = settle_on_a_place(shared=False)
    reset_core()
    torch.manual_seed(0)
    model = nn.Linear(8, 1).to(place)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    loader = AdaptiveDataLoader(TensorDataset(torch.randn(96, 8)), batch_size=12)
    wrapped = AdaptiveDataParallel(model, optimizer)
    began = 0.0
    try:
        for _ in remaining_epochs_until(1):
            for number, (x,) in enumerate(loader):
                if number == 4:
                    if os.environ["RANK"] == "1":
                        os.kill(os.getpid(), signal.SIGKILL)
                    began = time.perf_counter()
                optimizer.zero_grad()
                loss = wrapped(x.to(place)).square().mean()
                loss.backward()
                next(model.parameters()).grad.sum().item()  # type: ignore[union-attr]
                optimizer.step()
    except PeerLost:
        return time.perf_counter() - began
    raise AssertionError("the loss went unnoticed")


@two_gpus
def test_a_lost_peer_is_noticed_behind_a_kernel_that_waits_for_it() -> None:
    first, _ = run_ranks(_loses_a_peer, 2, dies=1)
    assert first < 30.0


def _groups_under_torchrun() -> tuple[str, str]:
    settle_on_a_place(shared=False)
    train("perceptron", "all_reduce", 11, place=str(settle_on_a_place(shared=False)))
    group = get_core().generation.group
    assert dist.is_initialized()
    return group.data.name(), group.control.name()


@two_gpus
def test_gradients_and_votes_travel_apart_under_torchrun() -> None:
    expected = ("gloo", "gloo") if ON_CPU else ("nccl", "gloo")
    assert run_ranks(_groups_under_torchrun, 2) == [expected] * 2
