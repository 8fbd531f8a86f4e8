"""Trials that train nothing, against plain Optuna with the same storage: trials a second, reports, the first line.

Each sweep is a process of its own that has not imported torch; rates are those of its second half.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.frame import Measurement

REPEATS = 3
ROOT = str(Path(__file__).resolve().parents[1])


def sweep(objective: str, how: str, storage: str, trials: int, jobs: int) -> dict[str, Any]:
    words = [sys.executable, "-m", "benchmarks.cheap_sweep", objective, how, storage, str(trials), str(jobs)]
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        done = subprocess.run(
            words, check=True, capture_output=True, text=True, cwd=folder, env={**os.environ, "PYTHONPATH": ROOT}
        )
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def median(name: str, *arguments: Any) -> float:
    return float(statistics.median(sweep(*arguments)[name] for _ in range(REPEATS)))


def measure() -> list[Measurement]:
    rows = []
    for objective, trials, target in (("square", 200, 0.1), ("forest", 24, 0.8)):
        rows.append(
            Measurement(
                what=f"{objective}, SQLite, two at a time",
                ours=median("rate", objective, "elastic", "sqlite", trials, 2),
                peer=median("rate", objective, "plain", "sqlite", trials, 2),
                unit="trials/s",
                peer_name="plain Optuna",
                lower_is_better=False,
                target=target,
            )
        )
    for storage in ("memory", "sqlite"):
        ours, plain = (median("pair_ms", "curve", how, storage, 6, 1) for how in ("elastic", "plain"))
        rows.append(
            Measurement(
                what=f"report and should_prune, study in {storage}",
                ours=ours,
                peer=3.0,
                unit="ms",
                peer_name="the longest it may take",
                target=1.0,
                details={"plain_ms": plain},
            )
        )
    rows.append(
        Measurement(
            what="optimize() to the first line of the first trial, without torch",
            ours=median("first_line_seconds", "square", "elastic", "memory", 2, 1),
            peer=0.7,
            unit="s",
            peer_name="the longest it may take",
            target=1.0,
        )
    )
    return rows
