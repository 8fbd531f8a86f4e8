"""States that lie on a GPU: on disk, between replicas, and within its memory."""

from __future__ import annotations

import os
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed import FileStore  # type: ignore[attr-defined]  # public, but not marked so
from torch.utils.data import TensorDataset

from dist_core import AdaptiveDataLoader, AdaptiveDataParallel, remaining_epochs_until
from dist_core.device import device_of, limit_memory, release_cached_memory
from dist_core.generations.group_needs import GroupNeeds, carrier_for
from dist_core.generations.process_groups import build_group
from dist_core.generations.state_transfer import broadcast_in_place, hand_over, share_state
from dist_core.state.checkpoint import CheckpointWriter
from dist_core.state.copies import in_host_memory
from dist_core.state.random_streams import RandomStreams
from dist_core.trial.current import get_core
from tests.support.checkpoints import written_by
from tests.support.gpus import on_a_gpu, settle_on_a_place
from tests.support.ranks import run_ranks
from tests.support.waiting import until

pytestmark = pytest.mark.gpu


def test_a_checkpoint_holds_what_was_there_when_it_was_asked_for(gpu: torch.device, tmp_path: Path) -> None:
    """Large enough for the copy to take a while, in which the device is busy with the next step."""
    writer = CheckpointWriter(tmp_path, on_error=pytest.fail)
    weights, buffer = torch.zeros(20_000_000, device=gpu), torch.zeros(10, device=gpu)
    busy = torch.randn(1000, 1000, device=gpu)
    for number in range(1, 4):
        weights.fill_(number)
        buffer.fill_(number)
        writer.save({"weights": weights, "buffer": buffer}, {}, keeps=lambda tensor: len(tensor) > 10)
        for _ in range(10):
            busy = torch.tanh(busy @ busy)
        buffer.fill_(-1.0)
        writer.settle()
        weights.fill_(-1.0)
        state = written_by(writer)
        assert state["weights"].unique().tolist() == state["buffer"].unique().tolist() == [float(number)]


@on_a_gpu
def test_a_checkpoint_holds_up_the_thread_that_trains_for_no_copy(gpu: torch.device, tmp_path: Path) -> None:
    weights = torch.zeros(100_000_000, device=gpu)
    writer = CheckpointWriter(tmp_path, on_error=pytest.fail)
    writer.save({"weights": weights}, {}, keeps=lambda tensor: True, wait=True)
    took = []
    for _ in range(3):
        device_of(gpu).mark().wait()
        began = time.perf_counter()
        writer.save({"weights": weights}, {}, keeps=lambda tensor: True)
        writer.settle()
        took.append(time.perf_counter() - began)
        until(lambda: not writer.busy)
    # 400 MB over a link of 64 GB/s take 6 ms at the least.
    assert min(took) < 0.006


def test_random_numbers_of_the_device_go_on_where_they_were(gpu: torch.device) -> None:
    streams = RandomStreams()
    torch.manual_seed(3)
    state = streams.state_dict()
    drawn = torch.rand(5, device=gpu).tolist()
    torch.rand(5, device=gpu)
    streams.load_state_dict(state)
    assert torch.rand(5, device=gpu).tolist() == drawn


@on_a_gpu
def test_a_share_of_a_gpu_is_all_that_a_replica_may_have(gpu: torch.device) -> None:
    _, total = torch.cuda.mem_get_info(gpu)
    limit_memory(gpu, 0.1)
    try:
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(int(0.2 * total), dtype=torch.uint8, device=gpu)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, gpu)
        release_cached_memory()


def _meet() -> tuple[Any, torch.device]:
    place = settle_on_a_place()
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = FileStore(os.environ["MEETING_PLACE"], world_size)
    needs = GroupNeeds(carriers=frozenset({carrier_for(device_of(place))}))
    nodes = ("here",) * world_size
    group = build_group(store, name="g", rank=rank, nodes=nodes, timeout=timedelta(minutes=1), needs=needs)
    return group, place


def _handed_over(meeting_place: str) -> list[float]:
    os.environ["MEETING_PLACE"] = meeting_place
    group, place = _meet()
    own = {"weights": torch.full((1000,), float(group.rank), device=place), "step": group.rank}
    state = hand_over(group, own if group.rank == 0 else None)
    return [float(state["weights"].sum()), float(state["step"])]


def test_a_state_on_a_gpu_is_handed_over(meeting_place: str) -> None:
    assert run_ranks(_handed_over, 2, meeting_place) == [[0.0, 0.0], [0.0, 0.0]]


def _shared_with_a_joiner(meeting_place: str) -> list[float]:
    os.environ["MEETING_PLACE"] = meeting_place
    group, place = _meet()
    weights = torch.full((1000,), 1.0 if group.rank < 2 else 9.0, device=place)
    own = {"weights": weights, "buffer": torch.full((5,), float(group.rank), device=place), "step": group.rank}
    state = share_state(group, own, joiners=(2,), is_replicated=lambda tensor: tensor.numel() == 1000)
    return [float(state["weights"].mean()), float(state["buffer"].mean()), float(state["step"])]


def test_a_joiner_receives_what_survivors_have_on_their_gpus(meeting_place: str) -> None:
    assert run_ranks(_shared_with_a_joiner, 3, meeting_place) == [[1.0, 0.0, 0.0]] * 3


def _made_rank_0s(meeting_place: str) -> list[list[float]]:
    os.environ["MEETING_PLACE"] = meeting_place
    group, place = _meet()
    tensors = [
        torch.full((4,), float(group.rank), device=place),
        torch.full((2, 3), float(group.rank), device=place).t(),
    ]
    broadcast_in_place(group, tensors)
    return [each.flatten().tolist() for each in in_host_memory(tensors)]


def test_tensors_on_a_gpu_become_rank_0s(meeting_place: str) -> None:
    assert run_ranks(_made_rank_0s, 2, meeting_place) == [[[0.0] * 4, [0.0] * 6]] * 2


class Hungry(nn.Module):
    """Keeps a gigabyte for every example until its backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = (x[:, :1] * self.weight).expand(-1, 1 << 27).exp()
        return wide.square().mean(dim=1)


@on_a_gpu
def test_a_batch_that_does_not_fit_is_made_smaller(gpu: torch.device, tmp_path: Path) -> None:
    free, total = torch.cuda.mem_get_info(gpu)
    torch.cuda.set_per_process_memory_fraction(min(1.0, 12e9 / total), gpu)
    assert free > 12e9, "the test needs 12 GB"
    try:
        seen = []

        def script() -> None:
            model = Hungry().to(gpu)
            optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
            loader = AdaptiveDataLoader(TensorDataset(torch.randn(64, 1)), batch_size=32)
            loader.autoscale_batch_size(64, local_bsz_bounds=(1, 32), gradient_accumulation=True)
            wrapped = AdaptiveDataParallel(model, optimizer)
            for _ in remaining_epochs_until(1):
                for (x,) in loader:
                    seen.append(len(x))
                    optimizer.zero_grad()
                    wrapped(x.to(gpu)).mean().backward()
                    optimizer.step()

        from dist_core.trial.plain_replica import run_training

        run_training(get_core(), script)
        assert seen[-1] < 32
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, gpu)
        release_cached_memory()
