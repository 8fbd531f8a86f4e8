"""Peers that are lost within a reduction."""

from __future__ import annotations

import os
import signal
import threading

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from dist_core import AdaptiveDataLoader, AdaptiveDataParallel, remaining_epochs_until
from dist_core.gradients.reduce import STRATEGIES
from dist_core.trial.current import get_core, reset_core
from tests.support.perceptrons import Perceptron, Points
from tests.support.ranks import run_ranks


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


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_lost_peer_breaks_the_step_and_leaves_the_weights(name: str) -> None:
    results = run_ranks(die_in_a_step, 2, name, dies=1)
    assert results == ["unchanged", None]


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
                core.generation.drop(core.models.group_needs)
                core.life.lost()
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
