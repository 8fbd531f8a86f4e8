"""Processes that go on as the next replica, and those that must not."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from tests.support.waiting import until
from tests.trials.test_launchers import record_of, request_for, until_started, wait_for_exit
from trials.inside.user_code import COMMAND_LINE
from trials.launch import LaunchRequest, LocalLauncher
from trials.launch.fork import server as fork_server
from trials.launch.fork.start import start_fork_server
from trials.record import ReplicaRecord

CODE = """
import os, sys, time
from trials.inside.keeping import keep_process

HELD = []

def main():
    return globals()[open("what").read()]()

def plain():
    print("runs in", os.getpid(), flush=True)
    keep_process()

def fails():
    keep_process()
    return 3

def does_not_ask():
    return 0

def leaves_a_thread():
    import threading
    threading.Thread(target=time.sleep, args=(30,), daemon=True).start()
    keep_process()

def leaves_a_process():
    import subprocess
    subprocess.Popen(["sleep", "30"])
    keep_process()

def leaks():
    HELD.append(b"x" * (200 << 20))
    keep_process()

def imports_torch():
    import torch
    keep_process()

def waits_a_moment():
    time.sleep(0.3)
    print("waited", flush=True)

def has_torch():
    return 5 + ("torch" in sys.modules)

def hears_sigterm():
    import signal
    signal.signal(signal.SIGTERM, lambda *_: None)
    keep_process()
"""
TORCH = "print('a stand-in')\n\n\ndef set_num_threads(number):\n    pass\n"
SAME = {"NAME": "same"}


class Kept:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "user_code.py").write_text(CODE)
        (folder / "library").mkdir()
        (folder / "library" / "torch.py").write_text(TORCH)
        (folder / "library" / "light.py").write_text("")
        self.launcher = LocalLauncher(slots=4, fork_server=start_fork_server([["light"], ["torch"]]))
        self.number = 0

    def start(self, function: str, **changes: object) -> ReplicaRecord:
        self.number += 1
        request = request_for(self.folder, function, SAME, name=f"r{self.number}")
        return self.launch(replace(request, **changes))  # type: ignore[arg-type]  # fields by name

    def launch(self, request: LaunchRequest) -> ReplicaRecord:
        return record_of(request, until_started(self.launcher, request, self.launcher.launch(request)))

    def spares(self, *others: ReplicaRecord) -> set[int]:
        """Processes of the fork server that are neither its own nor these replicas."""
        servers = self.launcher.servers
        assert servers is not None
        # One that is not ready has not said which process it is.
        until(lambda: all(server.ready for server in servers.chain))
        found = {child.pid for child in psutil.Process(servers.pid).children()}
        return found - servers.pids - {each.pid for each in others if each.pid is not None}

    def run(self, function: str, **changes: object) -> int | None:
        """Pid of a replica that has run to its end; it learns by a file which function it is to run."""
        (self.folder / "what").write_text(function)
        replica = self.start("main", **changes)
        self.status = wait_for_exit(self.launcher, replica).status
        return replica.pid


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Kept]:
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "library"))
    made = Kept(tmp_path)
    yield made
    made.launcher.close()


def test_a_process_that_leaves_nothing_behind_is_the_next_replica(kept: Kept) -> None:
    pids = [kept.run("plain") for _ in range(4)]
    assert len(set(pids)) == 1
    logs = sorted(kept.folder.glob("r*.log"))
    assert [path.read_text() for path in logs] == [f"runs in {pids[0]}\n"] * 4


@pytest.mark.parametrize(
    "function", ["fails", "does_not_ask", "leaves_a_thread", "leaves_a_process", "leaks", "imports_torch"]
)
def test_one_that_leaves_something_behind_ends(kept: Kept, function: str) -> None:
    first = kept.run("plain")
    assert kept.run(function) == first
    assert kept.run("plain") != first


def test_only_replicas_of_its_own_study_and_environment_get_it(kept: Kept) -> None:
    first = kept.run("plain")
    assert kept.run("plain", study="another") != first
    assert kept.run("plain", environ={**SAME, "PATH": os.environ["PATH"], "CUDA_VISIBLE_DEVICES": "1"}) != first
    identity = {**SAME, "PATH": os.environ["PATH"], "ELASTUNE_REPLICA_ID": "other", "ELASTUNE_CORES": "0"}
    assert kept.run("plain", environ=identity) == first


def test_what_is_asked_of_a_replica_that_has_ended_does_not_reach_the_next_one(kept: Kept) -> None:
    (kept.folder / "what").write_text("plain")
    ended = kept.start("main")
    assert wait_for_exit(kept.launcher, ended).status == 0
    (kept.folder / "what").write_text("waits_a_moment")
    present = kept.start("main")
    assert present.pid == ended.pid
    kept.launcher.stop(ended, force=True)
    assert wait_for_exit(kept.launcher, present).status == 0
    assert "waited" in (kept.folder / "r2.log").read_text()


def test_one_that_is_kept_hears_signals_as_a_fresh_one(kept: Kept) -> None:
    pid = kept.run("hears_sigterm")
    assert pid is not None
    process = psutil.Process(pid)
    process.terminate()
    process.wait(10.0)
    assert kept.run("plain") != pid


def test_one_that_nobody_needs_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    kept = Kept(tmp_path)
    pid = kept.run("plain")
    assert pid is not None and psutil.pid_exists(pid)
    process = psutil.Process(pid)
    kept.launcher.close()
    process.wait(10.0)
    assert fork_server.KEPT_SECONDS <= 30.0, "else it would hold memory that others need"


def test_code_that_brings_torch_starts_with_it_from_the_next_replica_on(kept: Kept) -> None:
    kept.run("has_torch")
    assert kept.status == 5
    kept.run("imports_torch")
    kept.run("has_torch")
    assert kept.status == 6
    # Another script still does without.
    kept.run("has_torch", environ={**SAME, COMMAND_LINE: '["other.py"]'}, study="other")
    assert kept.status == 5


def test_a_spare_process_is_the_next_replica_whatever_that_is(kept: Kept) -> None:
    """It has been forked before anybody asked, and knows nothing of what it is to be."""
    (kept.folder / "what").write_text("waits_a_moment")
    first = kept.start("main")
    until(lambda: len(kept.spares(first)) == 1)
    (spare,) = kept.spares(first)
    assert kept.run("has_torch", study="another") == spare
    assert kept.status == 5
    until(lambda: len(kept.spares(first) - {spare}) == 1)


def test_a_spare_that_is_gone_costs_nothing(kept: Kept) -> None:
    (kept.folder / "what").write_text("waits_a_moment")
    first = kept.start("main")
    until(lambda: len(kept.spares(first)) == 1)
    (spare,) = kept.spares(first)
    os.kill(spare, signal.SIGKILL)
    # It may have been asked in its last moment; then its replica is lost as any other, and the next one is not.
    if kept.run("has_torch", study="another") == spare:
        assert kept.status == -signal.SIGKILL
        kept.run("has_torch", study="another")
    assert kept.status == 5
