"""Latency of each command with 2,000 finished trials in the store.

Beside them in the same run: Python's own start, and `optuna --help`, the command line of the tuner that people know.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

from benchmarks.frame import Measurement
from scheduler.host.embedded import EmbeddedScheduler
from trials.record import Outcome, Reason, Report, Study
from trials.spec import TrialSpec
from trials.states import TrialState
from trials.store import sql_store
from trials.store.base import HistoryEntry

TRIALS = 2000
REPORTS = 8
REPEATS = 9
LIMIT = 0.150
HELP_LIMIT = 0.100


def fill(folder: Path) -> str:
    """A store with trials that are over; returns the id of the last one."""
    store = sql_store(f"sqlite:///{folder / 'trials.db'}")
    store.put_study(Study(name="big", title="big"))
    last, began = "", time.time() - 2.0 * TRIALS
    for number in range(TRIALS):
        record = store.submit(TrialSpec(study="big", number=number, entrypoint="m:f"), began + number)
        last = record.trial_id
        store.put_parameters(last, {"lr": 0.1 / (number + 1), "width": number % 64})
        store.set_outcome(last, Outcome(kind="value", value=number / TRIALS))
        reason = Reason(code="finished", sentence=f"returned {number / TRIALS}")
        store.save_trial(replace(record, state=TrialState.SUCCEEDED, reason=reason, finished_at=began + number + 60.0))
        store.add_history(HistoryEntry(at=began + number + 60.0, trial_id=last, what="succeeded", reason=reason))
        for step in range(REPORTS):
            store.add_report(Report(last, step, step / REPORTS, step * 32.0, began + number + step))
    store.close()
    return last


def median_seconds(command: list[str], environ: dict[str, str]) -> float:
    took = []
    for _ in range(REPEATS):
        began = time.perf_counter()
        done = subprocess.run(command, env=environ, capture_output=True, check=False, timeout=60)
        took.append(time.perf_counter() - began)
        assert done.returncode == 0, done.stderr.decode()
    return statistics.median(took)


def measure() -> list[Measurement]:
    elastune = str(Path(sys.executable).with_name("elastune"))
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        trial = fill(folder)
        embedded = EmbeddedScheduler(folder, slots=2, fork_server=False)
        client = embedded.start()
        environ = {**os.environ, "ELASTUNE_HOME": str(folder)}
        environ.pop("ELASTUNE_URL", None)
        commands = [
            ["--help"],
            ["ls", "--help"],
            ["ls"],
            ["ls", "--last", "0"],
            ["ls", "--json", "--last", "0"],
            ["studies"],
            ["nodes"],
            ["show", trial],
            ["why", trial],
            ["logs", trial],
            ["stop", trial],
            ["report"],
            ["page"],
            ["top", "--once"],
        ]
        try:
            bare = median_seconds([sys.executable, "-c", "pass"], environ)
            optuna = median_seconds([str(Path(sys.executable).with_name("optuna")), "--help"], environ)
            took = [median_seconds([elastune, *words], environ) for words in commands]
        finally:
            client.close()
            embedded.stop()
    details = {"trials": TRIALS, "python_alone": bare, "optuna_help": optuna}
    rows = []
    for words, seconds in zip(commands, took, strict=True):
        is_help = words[-1] == "--help"
        name = " ".join(word for word in words if word != trial)
        rows.append(
            Measurement(
                what=f"elastune {name}",
                ours=seconds * 1000.0,
                peer=(HELP_LIMIT if is_help else LIMIT) * 1000.0,
                unit="ms",
                peer_name="the longest it may take",
                target=1.0,
                details=details,
            )
        )
    return rows
