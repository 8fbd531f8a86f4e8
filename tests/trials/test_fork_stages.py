"""A fork server that serves before it has everything in memory, and goes on in a process forked from it."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.waiting import until
from tests.trials.test_launchers import request_for, started, wait_for_exit
from trials.launch import LocalLauncher
from trials.launch.fork.client import ForkServers
from trials.launch.fork.start import start_fork_server

SCRIPT = """
import sys
def tells():
    return sum(1 << place for place, name in enumerate(("quick", "slow")) if name in sys.modules)
"""
SLOW = "import pathlib, time\nwhile not (pathlib.Path(__file__).parent / 'go').exists():\n    time.sleep(0.01)\n"


class Staged:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "user_code.py").write_text(SCRIPT)
        (folder / "quick.py").write_text("")
        (folder / "slow.py").write_text(SLOW)
        self.launcher = LocalLauncher(slots=4, fork_server=start_fork_server([["quick"], ["slow"]]))
        assert self.launcher.servers is not None
        self.servers: ForkServers = self.launcher.servers
        self.number = 0

    def may_start(self) -> bool:
        return self.launcher.is_ready_for(request_for(self.folder, "tells", {}, name="r"))

    def has_in_memory(self) -> int | None:
        """What a replica that is started now has: 1 for the quick module, 2 for the slow one."""
        self.number += 1
        replica = started(self.launcher, self.folder, "tells", {}, name=f"r{self.number}")
        return wait_for_exit(self.launcher, replica).status

    def go_on(self) -> None:
        (self.folder / "go").touch()
        until(lambda: not any(server.is_on_its_way for server in self.servers.chain))


@pytest.fixture
def staged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Staged]:
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    made = Staged(tmp_path)
    until(lambda: made.servers.chain[0].ready)
    yield made
    (tmp_path / "go").touch()
    made.launcher.close()


def test_the_first_replica_of_a_code_does_without_what_is_not_there_yet(staged: Staged) -> None:
    assert staged.may_start()
    assert staged.has_in_memory() == 1
    assert not staged.may_start(), "each would import the rest by itself"
    staged.go_on()
    assert staged.may_start()
    assert staged.has_in_memory() == 3


def test_a_process_of_the_chain_that_is_lost_is_replaced(staged: Staged) -> None:
    staged.go_on()
    lost = staged.servers.chain[1].pid
    assert lost is not None
    os.kill(lost, signal.SIGKILL)
    until(lambda: staged.servers.chain[1].gone)
    assert staged.has_in_memory() in (1, 3)
    until(lambda: not any(server.is_on_its_way for server in staged.servers.chain))
    assert staged.has_in_memory() == 3
    assert staged.servers.chain[1].pid != lost


def test_one_that_ends_while_it_imports_is_done_without(staged: Staged) -> None:
    (staged.folder / "slow.py").write_text("import os\nos._exit(3)\n")
    staged.servers.kill()
    until(lambda: staged.servers.chain[0].gone)
    assert staged.has_in_memory() == 1
    until(lambda: staged.servers.chain[1].gone)
    first = staged.servers.pid
    until(staged.may_start)
    assert staged.has_in_memory() == 1
    assert staged.servers.pid == first


def test_code_that_has_changed_is_loaded_again_by_the_whole_chain(staged: Staged) -> None:
    (staged.folder / "user_code.py").write_text("def tells():\n    import quick, slow\n    return quick.VALUE\n")
    staged.go_on()
    (staged.folder / "quick.py").write_text("VALUE = 40 + 2\n")
    assert staged.has_in_memory() == 42
    assert staged.servers.trunk.ready, "the replica was forked, not started cold"
    until(lambda: all(server.ready for server in staged.servers.chain))
