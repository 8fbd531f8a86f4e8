"""Training outside of a loader's loops: ranks of torchrun train as with DistributedDataParallel, or behind a loop."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import dist_core
from tests.support.habits import PAIR, Kit, as_trial, examples, in_plain_pytorch, network, weights_of
from tests.support.ranks import run_ranks
from tests.support.shared_habits import mse

Trained = tuple[list[float], list[float]]


def without_a_loader(wraps: bool, seed: int) -> Trained:
    """Weights and buffers at the end: each rank draws its own data, begins with weights of its own, and accumulates."""
    rank = dist_core.rank() if not wraps else int(dist.get_rank())
    model = network(seed=rank, norm=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    wrapped: Any = DistributedDataParallel(model) if wraps else dist_core.AdaptiveDataParallel(model, optimizer)
    torch.manual_seed(seed + rank)
    for _ in range(4):
        optimizer.zero_grad()
        with wrapped.no_sync():
            mse(wrapped(torch.randn(8, 6)), torch.randn(8, 1)).backward()
        mse(nn.functional.dropout(wrapped(torch.randn(8, 6))), torch.randn(8, 1)).backward()
        optimizer.step()
    return weights_of(model), [float(value) for each in model.buffers() for value in each.flatten()]


def under_torchrun(seed: int) -> Trained:
    torch.set_num_threads(1)
    return without_a_loader(wraps=False, seed=seed)


def with_torchs_own(seed: int) -> Trained:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    try:
        return without_a_loader(wraps=True, seed=seed)
    finally:
        dist.destroy_process_group()


def test_ranks_of_torchrun_train_without_a_loader_as_with_torchs_own_wrapper() -> None:
    ours, theirs = run_ranks(under_torchrun, 3, 5), run_ranks(with_torchs_own, 3, 5)
    assert ours[0][0] == pytest.approx(theirs[0][0], abs=1e-6)
    assert ours[0][1] == pytest.approx(theirs[0][1], abs=1e-6)
    assert [each[0] for each in ours] == [ours[0][0]] * 3


def behind_an_uneven_step(kit: Kit) -> list[float]:
    """The last batch of the loop has 7 samples, which three replicas share unevenly."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    wrapped, data = kit.wrap(model, optimizer), examples(31)
    for _ in kit.epochs(2):
        for x, y in kit.loader(data):
            optimizer.zero_grad()
            mse(wrapped(x), y).backward()
            optimizer.step()
        # All samples, on all replicas.
        optimizer.zero_grad()
        mse(wrapped(data.tensors[0]), data.tensors[1]).backward()
        optimizer.step()
    return weights_of(model)


def before_the_first_loop(kit: Kit) -> list[float]:
    model, data = network(), examples()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader, wrapped = kit.loader(data), kit.wrap(model, optimizer)
    for _ in range(3):
        optimizer.zero_grad()
        mse(wrapped(data.tensors[0]), data.tensors[1]).backward()
        optimizer.step()
    for _ in kit.epochs(2):
        for x, y in loader:
            optimizer.zero_grad()
            mse(wrapped(x), y).backward()
            optimizer.step()
    return weights_of(model)


@pytest.mark.parametrize("habit", [behind_an_uneven_step, before_the_first_loop])
@pytest.mark.parametrize("replicas", [3, PAIR])
def test_what_all_replicas_do_outside_of_a_loop_is_done_once(habit: Any, replicas: int) -> None:
    ends, expected = as_trial(habit, replicas), in_plain_pytorch(habit)
    for weights in ends:
        assert weights == pytest.approx(expected, abs=2e-6)
