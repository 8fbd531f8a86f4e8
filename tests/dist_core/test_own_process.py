"""A process in which nothing of the suite runs the training ends with the status that says why."""

from __future__ import annotations

import subprocess
import sys

import pytest

from dist_core.errors import InvalidTraining, PeerLost
from dist_core.trial.current import comes_of_loss, get_core
from tests.support.project import ROOT

STATUSES = {
    "raise JoinAgain": 76,
    "raise RunAgain": 75,
    "raise ReplicaExit('left')": 77,
    "raise ReplicaExit('preempted', 143)": 143,
    "raise PeerLost('gone')": 75,
    "raise ValueError('a mistake')": 1,
    "get_core().leaving.postpone(PeerLost('gone'))": 75,
    "get_core().leaving.postpone(RunAgain())": 75,
    "leave_in_the_middle()": 0,
}
IN_FORKS = """
import os, sys
from dist_core.errors import *
import torch
import dist_core
from dist_core.trial.current import get_core, tell_by_status

def leave_in_the_middle():
    # A loop by steps, which goes on until nobody asks for batches any more.
    global batches
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    wrapped = dist_core.AdaptiveDataParallel(model, optimizer)
    loader = dist_core.AdaptiveDataLoader(torch.utils.data.TensorDataset(torch.randn(32, 4)), 8)
    batches = (batch for _ in iter(int, 1) for batch in loader)
    for _ in range(6):
        optimizer.zero_grad()
        wrapped(next(batches)[0]).pow(2).mean().backward()
        optimizer.step()

for code in sys.argv[1:]:
    pid = os.fork()
    if pid == 0:
        break
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
else:
    sys.exit()
tell_by_status(get_core())
exec(code)
"""
"""Each end in a process of its own, which is forked from one that has imported everything."""


@pytest.mark.slow
def test_status() -> None:
    ended = subprocess.run([sys.executable, "-c", IN_FORKS, *STATUSES], cwd=ROOT, capture_output=True, text=True)
    assert [int(line) for line in ended.stdout.split()] == list(STATUSES.values()), ended.stderr
    assert "a replica was lost" not in ended.stderr


def test_what_comes_of_a_loss() -> None:
    core = get_core()
    assert comes_of_loss(core, PeerLost("gone"))
    assert not comes_of_loss(core, InvalidTraining("wrong"))
    core.generation.broken = "replica 1 is gone"
    assert comes_of_loss(core, RuntimeError("connection closed by peer"))
