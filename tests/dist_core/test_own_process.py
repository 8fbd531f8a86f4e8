"""A process in which nothing of the suite runs the training ends with the status that says why."""

from __future__ import annotations

import subprocess
import sys

import pytest

from dist_core.errors import InvalidTraining, PeerLost
from dist_core.trial.current import comes_of_loss, get_core
from tests.support.project import ROOT


@pytest.mark.parametrize(
    ("end", "status"),
    [
        ("raise JoinAgain", 76),
        ("raise RunAgain", 75),
        ("raise ReplicaExit('left')", 77),
        ("raise ReplicaExit('preempted', 143)", 143),
        ("raise PeerLost('gone')", 75),
        ("raise ValueError('a mistake')", 1),
        ("get_core().leaving.postpone(PeerLost('gone'))", 75),
        ("get_core().leaving.postpone(RunAgain())", 75),
    ],
)
def test_status(end: str, status: int) -> None:
    code = (
        "from dist_core.errors import *; from dist_core.trial.current import get_core; "
        f"from dist_core.trial.current import tell_by_status; tell_by_status(get_core()); {end}"
    )
    ended = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert ended.returncode == status, ended.stderr


def test_what_comes_of_a_loss() -> None:
    core = get_core()
    assert comes_of_loss(core, PeerLost("gone"))
    assert not comes_of_loss(core, InvalidTraining("wrong"))
    core.generation.broken = "replica 1 is gone"
    assert comes_of_loss(core, RuntimeError("connection closed by peer"))
