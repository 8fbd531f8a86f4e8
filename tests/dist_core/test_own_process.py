"""A process in which nothing of the suite runs the training ends with the status that says why."""

from __future__ import annotations

import subprocess
import sys

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
}
IN_FORKS = """
import os, sys
from dist_core.errors import *
from dist_core.trial.current import get_core, tell_by_status

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


def test_status() -> None:
    ended = subprocess.run([sys.executable, "-c", IN_FORKS, *STATUSES], cwd=ROOT, capture_output=True, text=True)
    assert [int(line) for line in ended.stdout.split()] == list(STATUSES.values()), ended.stderr


def test_what_comes_of_a_loss() -> None:
    core = get_core()
    assert comes_of_loss(core, PeerLost("gone"))
    assert not comes_of_loss(core, InvalidTraining("wrong"))
    core.generation.broken = "replica 1 is gone"
    assert comes_of_loss(core, RuntimeError("connection closed by peer"))
