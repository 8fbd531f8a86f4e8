"""Half an hour of a scheduler that 1,000 trials have ended on, with 200 that live and 64 replicas: what it takes.

Replicas are real processes that keep their long polls open, report every 5 seconds and sleep otherwise.
ELASTUNE_MINUTES changes how long it lasts.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections import Counter
from pathlib import Path

import psutil

from benchmarks.frame import Measurement
from scheduler.client.connection import SchedulerClient
from scheduler.host.embedded import EmbeddedScheduler
from trials.spec import TrialSpec

ENDED, LIVE, REPLICAS = 1000, 200, 64
MINUTES = 30.0
MOST_MEMORY_MB = 100.0
MOST_OF_A_CORE = 0.1
ROOT = str(Path(__file__).resolve().parents[1])


def submit(client: SchedulerClient, folder: Path, numbers: range, entrypoint: str) -> None:
    for number in numbers:
        spec = TrialSpec(
            study="half-hour", number=number, entrypoint=entrypoint, python_path=(ROOT,), working_dir=str(folder)
        )
        client.request("POST", "/trials", spec.to_json())


def until(client: SchedulerClient, state: str, count: int, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while True:
        states = Counter(trial["state"] for trial in client.request("GET", "/trials"))
        if states[state] >= count:
            return
        assert time.monotonic() < deadline, states
        time.sleep(1.0)


def measure() -> list[Measurement]:
    minutes = float(os.environ.get("ELASTUNE_MINUTES", MINUTES))
    folder = Path(tempfile.mkdtemp(prefix="elastune-half-hour-"))
    os.environ["TRIVIAL_FOLDER"] = str(folder)
    scheduler = EmbeddedScheduler(folder / "state", slots=REPLICAS)
    client = scheduler.start()
    try:
        submit(client, folder, range(ENDED), "benchmarks.trivial:main")
        until(client, "succeeded", ENDED, 900.0)
        submit(client, folder, range(ENDED, ENDED + LIVE), "benchmarks.sleeper:main")
        until(client, "running", REPLICAS, 300.0)
        time.sleep(10.0)
        process = psutil.Process(scheduler.pid)
        began, used, curve = time.monotonic(), process.cpu_times(), []
        before = used
        for minute in range(max(1, round(minutes))):
            while time.monotonic() - began < 60.0 * (minute + 1):
                time.sleep(1.0)
            now = process.cpu_times()
            share = (now.user + now.system - before.user - before.system) / 60.0
            before = now
            curve.append({"megabytes": process.memory_full_info().uss / 1e6, "cores": share})
            print(f"  minute {minute + 1}: {curve[-1]['megabytes']:.1f} MB, {share:.3f} cores", flush=True)
    finally:
        client.close()
        scheduler.stop()
        shutil.rmtree(folder, ignore_errors=True)
    whole = (before.user + before.system - used.user - used.system) / (60.0 * len(curve))
    what = f"{ENDED} trials ended, {LIVE} live, {REPLICAS} replicas, {len(curve)} minutes"
    return [
        Measurement(
            what=f"{what}: memory at the end",
            ours=curve[-1]["megabytes"],
            peer=MOST_MEMORY_MB,
            unit="MB",
            peer_name="the most it may take",
            target=1.0,
            details={"curve": curve},
        ),
        Measurement(
            what=f"{what}: memory at the end against the first minute's",
            ours=curve[-1]["megabytes"],
            peer=curve[0]["megabytes"],
            unit="MB",
            peer_name="the first minute",
            target=1.1,
        ),
        Measurement(
            what=f"{what}: CPU time",
            ours=whole,
            peer=MOST_OF_A_CORE,
            unit="cores",
            peer_name="the most it may take",
            target=1.0,
        ),
    ]
