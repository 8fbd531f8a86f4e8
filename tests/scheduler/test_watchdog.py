"""A control loop that is stuck is noticed, told, and replaced together with its process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import IO

import httpx2
import pytest

from scheduler.host.server import EXIT_STUCK
from scheduler.loop.loop_thread import LOOK_SECONDS, MOST_SAVED_SECONDS, SHARE, STUCK_SECONDS, CpuBudget, Watchdog
from tests.support.site import TOKENS, Site
from tests.support.waiting import until

STUCK_SCHEDULER = """
import os, sys, threading, time
import scheduler.loop.loop_thread, scheduler.loop.control_loop
scheduler.loop.loop_thread.STUCK_SECONDS, scheduler.loop.loop_thread.LOOK_SECONDS = 1.0, 0.2
if os.environ.pop("STUCK", None):
    scheduler.loop.control_loop.ControlLoop.tick = lambda self: threading.Event().wait()
from scheduler.cli import main
sys.exit(main())
"""


class Time:
    def __init__(self) -> None:
        self.now = 0.0
        self.came_round_at = 0.0

    def age(self) -> float:
        return self.now - self.came_round_at


def test_a_loop_that_does_not_come_round_is_found_and_one_that_is_slow_is_not() -> None:
    now, found = Time(), []
    dog = Watchdog(now.age, lambda: found.append(now.now), clock=lambda: now.now)
    for _ in range(int(STUCK_SECONDS / LOOK_SECONDS)):
        now.now += LOOK_SECONDS
        assert not dog.look()
    now.came_round_at = now.now
    while not dog.look():
        now.now += LOOK_SECONDS
        assert now.age() < 2 * STUCK_SECONDS
    assert found == [now.now]
    assert now.age() > STUCK_SECONDS


def test_a_process_that_was_stopped_itself_blames_nobody() -> None:
    now = Time()
    dog = Watchdog(now.age, lambda: pytest.fail("the loop had no chance to come round"), clock=lambda: now.now)
    now.now = 10 * STUCK_SECONDS
    for _ in range(5):
        assert not dog.look()
        now.now += LOOK_SECONDS


def test_health_and_metrics_tell_the_loops_age(site: Site) -> None:
    assert site.http.get("/healthz").status_code == 200
    site.loop.thread._came_round_at = site.loop.thread._monotonic() - STUCK_SECONDS - 10.0
    assert site.http.get("/healthz").status_code == 503
    metrics = site.call("GET", "/metrics", token=TOKENS.for_reading()).text
    [age] = [line for line in metrics.splitlines() if line.startswith("elastune_loop_age_seconds ")]
    assert float(age.split()[1]) > STUCK_SECONDS


def start(folder: Path, *arguments: str, stderr: IO[str] | int = subprocess.PIPE) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", STUCK_SCHEDULER, "up", "--state-dir", str(folder), "--no-fork-server", *arguments],
        env={**os.environ, "STUCK": "1"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=stderr,
        text=True,
    )


@pytest.mark.slow
def test_a_shared_scheduler_that_is_stuck_starts_itself_anew(tmp_path: Path) -> None:
    with (tmp_path / "said").open("w") as said:
        process = start(tmp_path / "state", "--port", "0", "--slots", "1", stderr=said)
    assert process.stdout is not None
    try:
        announced = (line for line in process.stdout if "listens at" in line)
        next(announced)
        url = next(announced).split()[-1]
        token = (tmp_path / "state" / "token").read_text()

        def has_come_round() -> bool:
            metrics = httpx2.get(f"{url}/metrics", headers={"Authorization": f"Bearer {token}"}).text
            [tick] = [line for line in metrics.splitlines() if line.startswith("elastune_tick_seconds ")]
            return float(tick.split()[1]) > 0.0

        until(has_come_round, 30.0, "a loop comes round")
        assert process.poll() is None
        assert "has not run for" in (tmp_path / "said").read_text()
    finally:
        process.terminate()
        process.communicate()


def test_ones_own_scheduler_that_is_stuck_ends_with_its_threads_told(tmp_path: Path) -> None:
    process = start(tmp_path, "--embedded", "--slots", "1")
    assert process.stdin is not None and process.stdout is not None and process.stderr is not None
    # Its standard input stays open: it ends by itself.
    said = process.stderr.read()
    assert process.wait() == EXIT_STUCK
    for stream in (process.stdin, process.stdout, process.stderr):
        stream.close()
    assert "has not run for" in said and "loop_thread.py" in said


# ------------------------------------------------- the share of a core that looks at trials may cost, in virtual time


def rests(looks: int, cpu: float, budget: CpuBudget, now: float) -> tuple[list[float], float]:
    """Return the rest behind each of so many looks, which take as long as their CPU time, and the time after them."""
    found = []
    for _ in range(looks):
        now += cpu
        found.append(budget.rest_after(cpu, now))
        now += found[-1]
    return found, now


def test_a_few_looks_after_a_quiet_time_need_no_rest() -> None:
    assert sum(rests(20, 0.03, CpuBudget(100.0), 100.0)[0]) == 0.0


def test_in_the_long_run_the_share_is_kept() -> None:
    _, ended = rests(1000, 0.03, CpuBudget(100.0), 100.0)
    assert pytest.approx(SHARE * (ended - 100.0), rel=0.01) == 1000 * 0.03 - MOST_SAVED_SECONDS


def test_what_was_saved_has_a_limit() -> None:
    budget = CpuBudget(0.0)
    budget.rest_after(0.0, 1e6)
    assert budget.rest_after(MOST_SAVED_SECONDS + 0.1, 1e6) == pytest.approx(0.1 / SHARE)
