"""Whole sweeps whose driver, scheduler or disk fails in the middle: nothing finished is lost, nothing is left over."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from dist_core.generations.membership import LEASE_SECONDS
from tests.support.project import ROOT
from tests.support.sweep import SCRIPT, Sweep, assert_whole
from tests.support.waiting import until
from trials.store import SqlBacking
from trials.store.base import SlotInterval

pytestmark = pytest.mark.slow


@pytest.fixture
def sweep(tmp_path: Path) -> Iterator[Sweep]:
    made = Sweep(tmp_path)
    yield made
    made.end()


@pytest.mark.parametrize("victims", ["driver", "scheduler", "driver then scheduler"])
def test_a_killed_sweep_is_finished_without_losing_anything(sweep: Sweep, victims: str) -> None:
    """A sweep is begun twice, and what was killed is noticed in between."""
    process = sweep.start()
    sweep.until(lambda: len(sweep.finished()) >= 1)
    before = sweep.finished()
    scheduler = sweep.scheduler_pid()
    if "driver" in victims:
        process.send_signal(signal.SIGKILL)
        process.wait()
    if "scheduler" in victims:
        os.kill(scheduler, signal.SIGKILL)
    if "driver" in victims:
        assert sweep.start("--resume").wait(timeout=150) == 0, sweep.output()
    else:
        assert process.wait(timeout=150) == 0, sweep.output()
        assert sweep.scheduler_pid() != scheduler
    assert_whole(sweep, before)


def test_ctrl_c_ends_at_once_and_the_sweep_can_be_resumed(sweep: Sweep) -> None:
    """A sweep is begun twice."""
    process = sweep.start()
    sweep.until(lambda: len(sweep.finished()) >= 1)
    before = sweep.finished()
    began = time.monotonic()
    process.send_signal(signal.SIGINT)
    process.wait(timeout=60)
    assert time.monotonic() - began < 20.0
    assert "resume=True" in sweep.output()
    assert sweep.left_over() == []
    assert sweep.start("--resume").wait(timeout=150) == 0, sweep.output()
    assert_whole(sweep, before)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 8 MB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = shutil.which("mount")
    command = [mount or "mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(folder)]
    if mount is None or subprocess.run(command, check=False).returncode:
        pytest.skip("mounting a small file system needs privileges that this machine does not give")
    yield folder
    subprocess.run(["umount", "-l", folder], check=True)


def test_a_disk_that_fills_up_and_is_emptied_again_costs_nothing_finished(
    tmp_path: Path, small_disk: Path, request: pytest.FixtureRequest
) -> None:
    """The sweep has to run into the full disk, and behind it."""
    sweep = Sweep(tmp_path, state=small_disk / "state")
    process = sweep.start()
    request.addfinalizer(sweep.end)
    sweep.until(lambda: len(sweep.finished()) >= 1)
    before = sweep.finished()
    ballast = small_disk / "ballast"
    with open(ballast, "wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(b"x" * 4096)
    time.sleep(4.0)
    assert process.poll() is None, sweep.output()
    ballast.unlink()
    assert process.wait(timeout=150) == 0, sweep.output()
    assert_whole(sweep, before)


def test_a_state_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    occupied = tmp_path / "occupied"
    occupied.write_text("a file, not a folder")
    sweep = Sweep(tmp_path, state=occupied / "state")
    assert sweep.start().wait(timeout=60) != 0
    assert str(occupied) in sweep.output().splitlines()[-1]


def test_replicas_that_nobody_owns_any_more_end_by_their_lease(sweep: Sweep) -> None:
    """Nobody ends them before their lease runs out, 20 s after the last word of their owner."""
    process = sweep.start()
    sweep.until(lambda: len(sweep.finished()) >= 1)
    sweep.until(lambda: len(sweep.left_over()) >= 2)
    os.kill(sweep.scheduler_pid(), signal.SIGKILL)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert sweep.left_over()
    sweep.until(lambda: not sweep.left_over(), LEASE_SECONDS + 30.0)


def test_two_sweeps_share_one_scheduler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two whole sweeps."""
    home = tmp_path / "home"
    command = [sys.executable, "-m", "scheduler.cli", "up", "--slots", "3", "--port", "0"]
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "ELASTUNE_HOME": str(home), "OMP_NUM_THREADS": "1"}
    with open(tmp_path / "scheduler.out", "wb") as output:
        server = subprocess.Popen(command, env=environ, stdout=output, stderr=output, cwd=tmp_path)
    try:
        until((home / "server.json").exists, 30.0)
        monkeypatch.setenv("ELASTUNE_HOME", str(home))
        monkeypatch.setenv("ELASTUNE_URL", json.loads((home / "server.json").read_text())["url"])
        sweeps = []
        for name in ("one", "two"):
            (tmp_path / name).mkdir()
            sweeps.append(Sweep(tmp_path / name, trials=3))
            (tmp_path / name / "tune.py").write_text(SCRIPT.replace("slots=3", "slots=None"))
            sweeps[-1].start()
        for sweep in sweeps:
            assert sweep.process is not None
            assert sweep.process.wait(timeout=150) == 0, sweep.output()
            assert sorted(sweep.finished()) == list(range(3))
        listed = subprocess.run(
            [sys.executable, "-m", "scheduler.cli", "ls"], env={**environ}, capture_output=True, text=True, check=True
        ).stdout
        assert listed.count("succeeded") == 6
        store = SqlBacking(f"sqlite:///{home / 'trials.db'}")
        slots = map(SlotInterval.of, store.replicas(live_only=False))
        intervals = [row for row in slots if row.ended is not None]
        store.close()
        both = {
            (a.trial_id, b.trial_id)
            for a in intervals
            for b in intervals
            if a.trial_id != b.trial_id and a.began < (b.ended or 0) and b.began < (a.ended or 0)
        }
        assert both, "the two sweeps never ran at the same time"
    finally:
        server.send_signal(signal.SIGINT)
        server.wait(timeout=30)
