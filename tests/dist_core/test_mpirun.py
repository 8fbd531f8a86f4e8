"""Ranks that mpirun has started: who they are, what they talk over, and what they are told where they cannot."""

from __future__ import annotations

import os

import pytest
import torch

from dist_core import AdaptiveDataLoader, AdaptiveDataParallel, rank, remaining_epochs_until, world_size
from dist_core.errors import InvalidTraining
from dist_core.generations.torchrun import backends_for
from dist_core.link.environment import standalone_world, started_by_mpirun
from tests.support.ports import ReservedPort
from tests.support.ranks import run_ranks


def trains(address: dict[str, str]) -> tuple[int, int, list[float]] | str:
    """Train as a rank of mpirun's that was given this address; return its weights, or the error that it was told."""
    rank_here, size = os.environ.pop("RANK"), os.environ.pop("WORLD_SIZE")
    for name in ("TORCHELASTIC_USE_AGENT_STORE", "MASTER_ADDR", "MASTER_PORT"):
        del os.environ[name]
    os.environ.update(OMPI_COMM_WORLD_RANK=rank_here, OMPI_COMM_WORLD_SIZE=size, **address)
    torch.manual_seed(0)
    x = torch.randn(40, 3)
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    try:
        loader = AdaptiveDataLoader(torch.utils.data.TensorDataset(x), batch_size=10, shuffle=True)
        wrapped = AdaptiveDataParallel(model, optimizer)
        for _ in remaining_epochs_until(2):
            for (inputs,) in loader:
                optimizer.zero_grad()
                (wrapped(inputs) - inputs.sum(1, keepdim=True)).square().mean().backward()
                optimizer.step()
    except InvalidTraining as error:
        return str(error)
    return rank(), world_size(), model.weight.flatten().tolist()


@pytest.mark.parametrize(
    ("environ", "world"),
    [
        ({}, (0, 1)),
        ({"RANK": "2", "WORLD_SIZE": "4"}, (2, 4)),
        ({"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "3"}, (1, 3)),
        ({"PMI_RANK": "5", "PMI_SIZE": "8"}, (5, 8)),
        # torchrun's own count, also within a job of MPI's.
        ({"RANK": "0", "WORLD_SIZE": "2", "PMI_RANK": "5", "PMI_SIZE": "8"}, (0, 2)),
    ],
)
def test_who_has_started_a_rank_says_which_it_is(environ: dict[str, str], world: tuple[int, int]) -> None:
    assert standalone_world(environ) == world
    assert started_by_mpirun(environ) == ("WORLD_SIZE" not in environ and bool(environ))


def test_mpi_is_used_where_torch_was_built_with_it() -> None:
    """As a stand-in for such a build, what torch would say of it."""
    assert backends_for(mpirun=True, mpi=True, gpus=False) == "mpi"
    assert backends_for(mpirun=False, mpi=True, gpus=False) == "gloo"
    assert backends_for(mpirun=False, mpi=False, gpus=True) == "cpu:gloo,cuda:nccl"
    for mpi, gpus, words in ((False, False, "this torch was built without MPI"), (True, True, "NCCL, which GPUs need")):
        with pytest.raises(InvalidTraining, match=f"an address to use .*{words}.* mpirun -x MASTER_ADDR="):
            backends_for(mpirun=True, mpi=mpi, gpus=gpus)


def test_ranks_of_mpirun_train_together_where_they_have_an_address() -> None:
    with ReservedPort() as port:
        first, second = run_ranks(trains, 2, {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)})
    assert (first[:2], second[:2]) == ((0, 2), (1, 2))
    assert first[2] == second[2]
    [alone] = run_ranks(trains, 1, {})
    assert alone[2] == pytest.approx(first[2], abs=1e-5)


def test_without_one_they_are_told() -> None:
    told = "mpirun started these ranks without MASTER_ADDR, but they must meet at an address to use Gloo"
    assert all(words.startswith(told) for words in run_ranks(trains, 2, {}))
