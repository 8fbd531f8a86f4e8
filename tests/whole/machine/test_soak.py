"""Sweeps under a random fault every ten seconds, for half an hour: nothing is lost, nothing leaks.

ELASTUNE_SOAK_MINUTES sets another length, ELASTUNE_SOAK_SEED another order of faults. What happened is printed at the
end and written to ``soak.json`` where ELASTUNE_SOAK_OUTPUT names a folder.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import time
from collections import Counter
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.support.sweep import Sweep, assert_whole
from trials.record import ReplicaRecord
from trials.store import SqlBacking

MINUTES = float(os.environ.get("ELASTUNE_SOAK_MINUTES", "30"))
BETWEEN_SECONDS = 10.0
TRIALS = 10
FAULTS = {
    "a replica killed": 5,
    "a trial's replicas killed": 3,
    "a replica stopped": 1,
    "the fork server killed": 3,
    "the scheduler killed": 3,
    "the driver killed": 3,
    "everything killed": 1,
}
"""With their weights. A stopped replica takes 45 s to be noticed, so that it comes up less often."""

pytestmark = [pytest.mark.slow, pytest.mark.timeout(MINUTES * 60.0 + 900.0)]


class Vandal:
    """Does something bad to a sweep that runs; knows what it has done."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.done: Counter[str] = Counter()

    def strike(self, sweep: Sweep) -> str | None:
        fault = self.random.choices(list(FAULTS), list(FAULTS.values()))[0]
        victims = self._victims(fault, sweep)
        if not victims:
            return None
        how = signal.SIGSTOP if "stopped" in fault else signal.SIGKILL
        for pid in victims:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, how)
        self.done[fault] += 1
        return fault

    def _victims(self, fault: str, sweep: Sweep) -> list[int]:
        replicas = [row for row in self._replicas(sweep) if row.pid is not None]
        scheduler = [pid for pid in [_scheduler(sweep)] if pid is not None]
        driver = [sweep.process.pid] if sweep.process is not None and sweep.process.poll() is None else []
        servers = [pid for pid in scheduler for pid in _fork_servers(pid)]
        if fault == "the scheduler killed":
            return scheduler
        if fault == "the driver killed":
            return driver
        if fault == "the fork server killed":
            return servers
        if fault == "everything killed":
            return [*driver, *scheduler, *servers, *(row.pid for row in replicas if row.pid is not None)]
        if not replicas:
            return []
        chosen = self.random.choice(replicas)
        if fault == "a trial's replicas killed":
            return [row.pid for row in replicas if row.trial_id == chosen.trial_id and row.pid is not None]
        return [chosen.pid] if chosen.pid is not None else []

    @staticmethod
    def _replicas(sweep: Sweep) -> list[ReplicaRecord]:
        if not (sweep.state / "trials.db").exists():
            return []
        store = SqlBacking(f"sqlite:///{sweep.state / 'trials.db'}")
        try:
            rows = store.replicas()
        finally:
            store.close()
        return [row for row in rows if row.pid is not None and psutil.pid_exists(row.pid)]


def _scheduler(sweep: Sweep) -> int | None:
    try:
        pid = sweep.scheduler_pid()
    except (OSError, ValueError, KeyError):
        return None
    with contextlib.suppress(psutil.Error):
        if "scheduler.cli" in " ".join(psutil.Process(pid).cmdline()):
            return pid
    return None


def _fork_servers(scheduler: int) -> list[int]:
    with contextlib.suppress(psutil.Error):
        children = psutil.Process(scheduler).children()
        return [child.pid for child in children if "trials.launch.fork.server" in " ".join(child.cmdline())]
    return []


def run_to_its_end(sweep: Sweep, vandal: Vandal, stop_at: float) -> dict[int, Any]:
    """Start the driver again whenever it is gone; results as they were first seen."""
    seen: dict[int, Any] = {}
    process = sweep.start()
    deadline = max(stop_at, time.monotonic()) + 600.0
    next_fault = time.monotonic() + BETWEEN_SECONDS
    while True:
        assert time.monotonic() < deadline, sweep.output()[-3000:]
        time.sleep(0.5)
        for number, result in sweep.finished().items():
            assert seen.setdefault(number, result) == result
        status = process.poll()
        if status == 0:
            return seen
        if status is not None:
            assert status == -signal.SIGKILL, sweep.output()[-3000:]
            process = sweep.start("--resume")
        if next_fault <= time.monotonic() < stop_at:
            vandal.strike(sweep)
            next_fault += BETWEEN_SECONDS


def test_nothing_is_lost_under_random_faults(tmp_path: Path) -> None:
    """As long as ELASTUNE_SOAK_MINUTES says."""
    seed = int(os.environ.get("ELASTUNE_SOAK_SEED", "0"))
    vandal = Vandal(seed)
    began = time.monotonic()
    stop_at = began + MINUTES * 60.0
    sweeps = finished = leaked = 0
    while time.monotonic() < stop_at:
        folder = tmp_path / f"sweep-{sweeps}"
        folder.mkdir()
        sweep = Sweep(folder, trials=TRIALS)
        try:
            seen = run_to_its_end(sweep, vandal, stop_at)
            leaked += len(sweep.left_over())
            assert_whole(sweep, seen)
        finally:
            sweep.end()
        sweeps += 1
        finished += len(seen)
    figures = {
        "minutes": (time.monotonic() - began) / 60.0,
        "seed": seed,
        "faults": dict(vandal.done),
        "faults_in_all": sum(vandal.done.values()),
        "sweeps": sweeps,
        "trials_finished": finished,
        "trials_lost": sweeps * TRIALS - finished,
        "processes_left": leaked,
    }
    print(json.dumps(figures))
    output = os.environ.get("ELASTUNE_SOAK_OUTPUT")
    if output:
        (Path(output) / "soak.json").write_text(json.dumps(figures, indent=2))
    assert figures["trials_lost"] == 0
    assert figures["processes_left"] == 0
