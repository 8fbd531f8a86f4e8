"""Lost peers within a reduction, and servers of parameters."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from dist_core import AdaptiveDataLoader, AdaptiveDataParallel, remaining_epochs_until
from dist_core.errors import PeerLost
from dist_core.gradients.reduce import STRATEGIES
from dist_core.trial.current import get_core, reset_core
from tests.support.perceptrons import Perceptron, Points
from tests.support.ranks import run_ranks

SYNCHRONOUS = [name for name in STRATEGIES if name != "parameter_server"]


def die_in_a_step(name: str) -> str | None:
    """Rank 1 is killed in its fourth step; the others learn of it at that step's end instead of waiting for ever."""
    reset_core()
    model = Perceptron()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = AdaptiveDataLoader(Points(), batch_size=11)
    wrapped = AdaptiveDataParallel(model, optimizer, reduction=name)
    core = get_core()
    for _ in remaining_epochs_until(1):
        for x, y in loader:
            if core.position.steps == 3 and core.generation.group.rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            optimizer.zero_grad()
            before = [parameter.detach().clone() for parameter in model.parameters()]
            nn.functional.cross_entropy(wrapped(x), y).backward()
            optimizer.step()
            if core.broken is not None:
                unchanged = all(torch.equal(mine, old) for mine, old in zip(model.parameters(), before, strict=True))
                return "unchanged" if unchanged else "changed"
    return None


@pytest.mark.parametrize("name", SYNCHRONOUS)
def test_a_lost_peer_breaks_the_step_and_leaves_the_weights(name: str) -> None:
    results = run_ranks(die_in_a_step, 2, name, dies=1)
    assert results == ["unchanged", None]


def asynchronous(slow: bool, momentum: float) -> tuple[list[float], float, int]:
    """Weights after the training, their loss over all data, and how far this replica was ever ahead of the slowest."""
    reset_core()
    torch.manual_seed(0)
    model = Perceptron()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=momentum)
    loader = AdaptiveDataLoader(Points(), batch_size=12, shuffle=True)
    wrapped = AdaptiveDataParallel(model, optimizer, reduction="parameter_server")
    core = get_core()
    ahead = 0
    for _ in remaining_epochs_until(40):
        for x, y in loader:
            if slow and core.generation.group.rank == 1:
                time.sleep(0.004)
            optimizer.zero_grad()
            nn.functional.cross_entropy(wrapped(x), y).backward()
            optimizer.step()
            ahead = max(ahead, core.vote.steps_ahead)
    assert core.broken is None
    data = Points()
    with torch.no_grad():
        loss = float(nn.functional.cross_entropy(model(data.x), data.y))
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()]).tolist(), loss, ahead


@pytest.mark.parametrize("slow", [False, True])
def test_a_parameter_server_learns_and_all_end_with_its_weights(slow: bool) -> None:
    results = run_ranks(asynchronous, 3, slow, 0.5)
    assert all(weights == results[0][0] for weights, _, _ in results)
    assert results[0][1] < 0.9 < 1.38
    # Nobody waits for the others in each step, and nobody runs away from them.
    assert all(0 < ahead <= 3 for _, _, ahead in results)


def test_a_parameter_server_alone_is_plain_training() -> None:
    weights, _, ahead = run_ranks(asynchronous, 1, False, 0.5)[0]
    assert ahead == 0
    assert len(weights) > 100


def server_dies() -> str:
    try:
        return train_until_broken()
    except PeerLost:
        # Noticed at the end of a step, where a scheduler would have published a generation to go on in.
        return "noticed"


def train_until_broken() -> str:
    reset_core()
    model = Perceptron()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = AdaptiveDataLoader(Points(), batch_size=12)
    wrapped = AdaptiveDataParallel(model, optimizer, reduction="parameter_server")
    core = get_core()
    for _ in remaining_epochs_until(100):
        for x, y in loader:
            if core.position.steps == 7 and core.generation.group.rank == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            optimizer.zero_grad()
            nn.functional.cross_entropy(wrapped(x), y).backward()
            optimizer.step()
            if core.broken is not None:
                return "noticed"
    return "not noticed"


def test_a_server_that_dies_is_noticed() -> None:
    assert run_ranks(server_dies, 3, dies=0) == [None, "noticed", "noticed"]


def lose_a_peer_that_others_wait_for(name: str) -> str:
    """Rank 1 dies in a step of a ring of three; who notices closes its group, by which the next one notices."""
    reset_core()
    model = nn.Sequential(*(nn.Linear(300, 300) for _ in range(8)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = AdaptiveDataLoader(TensorDataset(torch.randn(300, 300)), batch_size=6)
    wrapped = AdaptiveDataParallel(model, optimizer, reduction=name, bucket_cap_mb=0.4)
    core = get_core()
    for _ in remaining_epochs_until(1):
        for (x,) in loader:
            optimizer.zero_grad()
            loss = wrapped(x).square().mean()
            if core.position.steps == 5 and core.generation.group.rank == 1:
                threading.Timer(0.003, os.kill, (os.getpid(), signal.SIGKILL)).start()
            loss.backward()
            optimizer.step()
            if core.broken is not None:
                # As in a switch to the generation without the lost one; torchrun's own groups stay with torch.
                core.changes._drop_group()
                return "noticed"
    return "not noticed"


def is_noticed_by_all(name: str) -> bool:
    """Once in some hundred times gloo lets a survivor wait on; in a trial it is woken by the scheduler's word."""
    try:
        results = run_ranks(lose_a_peer_that_others_wait_for, 3, name, seconds=20.0, dies=1)
    except AssertionError as error:
        if "did not answer" in str(error):
            return False
        raise
    assert results == ["noticed", None, "noticed"]
    return True


@pytest.mark.parametrize("name", ["all_reduce", "round_robin", "sharded"])
def test_all_learn_of_a_lost_peer(name: str) -> None:
    assert any(is_noticed_by_all(name) for _ in range(3))
