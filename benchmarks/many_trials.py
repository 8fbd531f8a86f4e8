"""1,000 trials queued and 64 replicas alive: what the scheduler's process takes of memory and of a core.

Replicas are real processes that keep their long polls open, report every 5 seconds and sleep otherwise. Measured is
the scheduler alone, over half a minute after all of them have come up.
"""

from __future__ import annotations

import shutil
import statistics
import tempfile
import time
from pathlib import Path

import psutil

from benchmarks.frame import Measurement
from scheduler.client.connection import SchedulerClient
from scheduler.host.embedded import EmbeddedScheduler
from trials.spec import TrialSpec

TRIALS = 1000
REPLICAS = 64
SECONDS = 30.0
MOST_MEMORY_MB = 300.0
MOST_OF_A_CORE = 0.2
ROOT = str(Path(__file__).resolve().parents[1])


def submit(client: SchedulerClient, folder: Path) -> float:
    """Seconds to submit all trials, one after another."""
    began = time.perf_counter()
    for number in range(TRIALS):
        spec = TrialSpec(
            study="many",
            number=number,
            entrypoint="benchmarks.sleeper:main",
            python_path=(ROOT,),
            working_dir=str(folder),
        )
        client.request("POST", "/trials", spec.to_json())
    return time.perf_counter() - began


def measure() -> list[Measurement]:
    folder = Path(tempfile.mkdtemp(prefix="elastune-many-"))
    scheduler = EmbeddedScheduler(folder / "state", slots=REPLICAS)
    client = scheduler.start()
    try:
        seconds = submit(client, folder)
        process = psutil.Process(scheduler.pid)
        deadline = time.monotonic() + 300.0
        while time.monotonic() < deadline:
            trials = client.request("GET", "/overview")["trials"]
            alive = sum(trial["state"] == "running" for trial in trials)
            if alive == REPLICAS:
                break
            time.sleep(1.0)
        assert alive == REPLICAS, f"only {alive} replicas came up"
        time.sleep(5.0)
        used, memory = process.cpu_times(), []
        began = time.monotonic()
        while time.monotonic() - began < SECONDS:
            memory.append(process.memory_full_info().uss / 1e6)
            time.sleep(1.0)
        passed, now = time.monotonic() - began, process.cpu_times()
        share = (now.user + now.system - used.user - used.system) / passed
        asked = time.perf_counter()
        client.request("GET", "/overview")
        answered = time.perf_counter() - asked
    finally:
        scheduler.stop()
        shutil.rmtree(folder, ignore_errors=True)
    details = {"submit_seconds": seconds, "overview_seconds": answered}
    what = f"{TRIALS} trials queued, {REPLICAS} replicas alive"
    return [
        Measurement(
            what=f"{what}: memory",
            ours=statistics.median(memory),
            peer=MOST_MEMORY_MB,
            unit="MB",
            peer_name="the most it may take",
            target=1.0,
            details=details,
        ),
        Measurement(
            what=f"{what}: CPU time",
            ours=share,
            peer=MOST_OF_A_CORE,
            unit="cores",
            peer_name="the most it may take",
            target=1.0,
            details=details,
        ),
    ]
