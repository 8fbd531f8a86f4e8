"""The web page: how soon a large study is there, how smoothly it scrolls, and what open pages cost the scheduler.

A real browser on a real scheduler: 5,000 trials with 1,000 reports each, then 200 live trials that report twice a
second to ten open pages, and the time from a report's arrival to its point on the screen.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import sqlalchemy as sa

from benchmarks.frame import Measurement
from scheduler.client import Client
from trials.record import Study
from trials.spec import TrialSpec
from trials.store import SqlBacking
from trials.store.tables import replicas, reports, trials

TRIALS = 5000
REPORTS = 1000
FIRST_VIEW_SECONDS = 1.0
FRAME_SECONDS = 1.0 / 60.0
PAGE_MEMORY_MB = 150.0
POINT_SECONDS = 0.3
LIVE = 200
AMONG = 50
"""Trials that report while a large study is looked at."""
PAGES = 10
CORE = 0.05
SECONDS = 20.0
OPENINGS = 5
ROOT = str(Path(__file__).resolve().parents[1])


def fill(folder: Path) -> None:
    """A study whose trials are over, written at once."""
    folder.mkdir(mode=0o700)
    store = SqlBacking(f"sqlite:///{folder / 'trials.db'}")
    store.save_study(Study(name="large", title="large", direction="maximize"))
    spec = json.dumps(TrialSpec(study="large", number=0, entrypoint="m:f", max_replicas=4).to_json())
    now = time.time() - 100_000.0
    with store._engine.begin() as connection:
        for first in range(0, TRIALS, 500):
            numbers = range(first, first + 500)
            connection.execute(
                trials.insert(),
                [
                    {
                        "trial_id": f"t{number:010x}",
                        "study": "large",
                        "number": number,
                        "spec": spec.replace('"number": 0', f'"number": {number}'),
                        "state": "succeeded",
                        "reason_code": "finished",
                        "reason_sentence": f"returned {number / TRIALS}",
                        "submitted_at": now + 10.0 * number,
                        "finished_at": now + 10.0 * number + 80.0,
                        "outcome": json.dumps({"kind": "value", "value": number / TRIALS}),
                        "parameters": json.dumps({"lr": 10 ** (-1 - number % 40 / 10), "width": number % 64}),
                    }
                    for number in numbers
                ],
            )
            connection.execute(
                replicas.insert(),
                [
                    {
                        "replica_id": f"t{number:010x}-{part}",
                        "trial_id": f"t{number:010x}",
                        "node": f"n{number % 2}",
                        "slot": number // 2 % 4,
                        "launch_index": part,
                        "state": "gone",
                        "job": "",
                        "launched_at": now + 10.0 * number + 40.0 * part,
                        "gone_at": now + 10.0 * number + 40.0 * part + 39.0,
                    }
                    for number in numbers
                    for part in range(2)
                ],
            )
        for number in range(TRIALS):
            connection.execute(
                reports.insert(),
                [
                    {
                        "trial_id": f"t{number:010x}",
                        "step": step,
                        "value": 1.0 - 1.0 / (step + 2),
                        "progress": 32.0 * step,
                        "at": now + 10.0 * number + 0.08 * step,
                    }
                    for step in range(REPORTS)
                ],
            )
        connection.execute(sa.text("PRAGMA optimize"))
    store.close()


@contextmanager
def scheduler_on(folder: Path, *words: str) -> Iterator[psutil.Process]:
    process = subprocess.Popen(
        [sys.executable, "-m", "scheduler.cli", "up", "--state-dir", str(folder), "--port", "7593", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert process.stdout is not None
    for line in process.stdout:
        if "#code=" in line:
            break
    try:
        yield psutil.Process(process.pid)
    finally:
        process.terminate()
        process.wait()
        process.stdout.close()


def link(folder: Path) -> str:
    with Client.connect(state_dir=folder) as client:
        return client.page_link()


FRAMES = """
    const took = []
    let last = performance.now()
    for (let frame = 0; frame < 360; frame += 1) {
        step()
        await new Promise(requestAnimationFrame)
        const now = performance.now()
        took.push(now - last)
        last = now
    }
    return took
"""
SCROLL = f"""async () => {{
    const box = document.querySelector('.table')
    let down = true
    const step = () => {{
        if (box.scrollTop + box.clientHeight >= box.scrollHeight - 400) down = false
        if (box.scrollTop <= 0) down = true
        box.scrollTop += down ? 400 : -400
    }}
    {FRAMES}
}}"""
FOLLOW = f"""async () => {{ const step = () => undefined; {FRAMES} }}"""


def renderer_memory() -> float:
    """Megabytes that the largest of the browser's page processes has to itself."""
    found = [0.0]
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):
            if "--type=renderer" in process.cmdline():
                found.append(process.memory_full_info().uss / 1e6)
    return max(found)


def large_study(browser: Any, scratch: Path) -> list[Measurement]:
    folder = scratch / "large"
    fill(folder)
    opened = []
    with scheduler_on(folder, "--emulate", "20x10"):
        context = browser.new_context(viewport={"width": 1400, "height": 900})
        page = context.new_page()
        page.goto(link(folder))
        page.get_by_text("trials are over").wait_for(timeout=60_000)
        for _ in range(OPENINGS):
            page.goto("about:blank")
            began = time.perf_counter()
            page.goto("http://127.0.0.1:7593/#/trials")
            page.get_by_text(f"{TRIALS} trials").wait_for()
            page.locator(".table .body .row").first.wait_for()
            opened.append(time.perf_counter() - began)
        frames = page.evaluate(SCROLL)
        for view in ("slots", "search", "why", "trials"):
            page.evaluate("view => { location.hash = '#/' + view }", view)
            page.wait_for_timeout(1500)
        session = context.new_cdp_session(page)
        session.send("HeapProfiler.collectGarbage")
        memory = page.evaluate("performance.memory.usedJSHeapSize") / 1e6
        process = renderer_memory()
        submit_live(folder, AMONG)
        page.wait_for_timeout(2000)
        updating = page.evaluate(SCROLL)
        page.evaluate("location.hash = '#/slots'")
        page.locator("canvas").first.wait_for()
        page.wait_for_timeout(1500)
        following = page.evaluate(FOLLOW)
        context.close()
    what = f"{TRIALS} trials with {REPORTS} reports each"
    return [
        Measurement(
            what=f"{what}: first view",
            ours=statistics.median(opened),
            peer=FIRST_VIEW_SECONDS,
            unit="s",
            peer_name="the longest it may take",
            target=1.0,
        ),
        frames_row(f"{what}: a frame while the table scrolls", frames),
        frames_row(f"{what}: a frame while the table scrolls and {AMONG} more trials report twice a second", updating),
        frames_row(f"{what}: a frame while the picture of slots follows these", following),
        Measurement(
            what=f"{what}: memory of the page's process after all views",
            ours=process,
            peer=PAGE_MEMORY_MB,
            unit="MB",
            peer_name="the most it may take",
            target=1.0,
            details={"objects": memory},
        ),
    ]


def frames_row(what: str, milliseconds: list[float]) -> Measurement:
    return Measurement(
        what=f"{what}, median",
        ours=statistics.median(milliseconds) / 1000.0,
        peer=FRAME_SECONDS,
        unit="s",
        peer_name="60 frames a second",
        target=1.05,
        details={"p95": sorted(milliseconds)[int(0.95 * len(milliseconds))], "worst": max(milliseconds)},
    )


def submit_live(folder: Path, count: int = LIVE) -> str:
    """Trials that only report; returns the id of the one that reports when it reports."""
    with Client.connect(state_dir=folder) as client:
        client.connection.request("PUT", "/studies/live", {"owner": "benchmark"})
        client.connection.request("POST", "/studies/live/detach", {"owner": "benchmark"})
        watched = ""
        for number in range(count):
            spec = {
                "study": "live",
                "number": number,
                "entrypoint": "benchmarks.sleeper:main",
                "python_path": [ROOT],
                "working_dir": str(folder),
                "environ": {"SLEEPER_SECONDS": "0.5", "SLEEPER_TELLS": "time"} if number == 0 else {},
                "driven": False,
            }
            made = client.connection.request("POST", "/trials", spec)
            watched = watched or made["trial_id"]
        deadline = time.monotonic() + 240.0
        while time.monotonic() < deadline:
            reporting = sum(trial.step is not None for trial in client.trials(state="running"))
            if reporting == count:
                return watched
            time.sleep(1.0)
    raise TimeoutError(f"{reporting} of {count} trials report")


def share_of_core(process: psutil.Process) -> float:
    used, began = process.cpu_times(), time.monotonic()
    time.sleep(SECONDS)
    now = process.cpu_times()
    return (now.user + now.system - used.user - used.system) / (time.monotonic() - began)


WATCH = """() => {
    const chart = document.querySelector("[aria-label^='reported value']")
    window.seen = []
    new MutationObserver(() => {
        requestAnimationFrame(() => window.seen.push([chart.getAttribute('aria-label'), Date.now() / 1000]))
    }).observe(chart, {attributes: true, attributeFilter: ['aria-label']})
}"""


def live_trials(browser: Any, scratch: Path) -> list[Measurement]:
    folder = scratch / "live"
    with scheduler_on(folder, "--emulate", "20x10") as process:
        watched = submit_live(folder)
        time.sleep(5.0)
        alone = share_of_core(process)
        contexts = []
        for _ in range(PAGES):
            context = browser.new_context()
            page = context.new_page()
            page.goto(link(folder))
            page.get_by_text("trials train").wait_for()
            contexts.append(context)
        time.sleep(3.0)
        watching = share_of_core(process)
        for context in contexts[1:]:
            context.close()
        page = contexts[0].pages[0]
        page.goto(f"http://127.0.0.1:7593/#/trial/{watched}")
        page.locator("[aria-label^='reported value']").wait_for()
        page.evaluate(WATCH)
        time.sleep(SECONDS)
        seen = page.evaluate("window.seen")
        contexts[0].close()
        with Client.connect(state_dir=folder) as client:
            sent = [point[1] for point in client.story(watched)["reports"]]
    took = []
    for label, at in seen:
        points = int(label.split(", ")[1].split()[0])
        if points <= len(sent):
            took.append(at - sent[points - 1])
    return [
        Measurement(
            what=f"{PAGES} open pages on {LIVE} live trials: the scheduler's CPU time for them",
            ours=watching - alone,
            peer=CORE,
            unit="cores",
            peer_name="the most that they may cost",
            target=1.0,
            details={"without": alone, "with": watching},
        ),
        Measurement(
            what="from a report in a replica to its point on the screen, median",
            ours=statistics.median(took),
            peer=POINT_SECONDS,
            unit="s",
            peer_name="the longest it may take",
            target=1.0,
            details={"points": len(took), "p95": sorted(took)[int(0.95 * len(took))]},
        ),
    ]


def measure() -> list[Measurement]:
    from playwright.sync_api import sync_playwright

    browser_path = shutil.which("chromium") or shutil.which("google-chrome")
    scratch = Path(tempfile.mkdtemp(prefix="elastune-page-"))
    try:
        with sync_playwright() as running:
            browser = running.chromium.launch(
                executable_path=browser_path, args=["--no-sandbox", "--enable-precise-memory-info"]
            )
            rows = [*large_study(browser, scratch), *live_trials(browser, scratch)]
            browser.close()
            return rows
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
