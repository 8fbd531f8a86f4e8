"""Average completion times on the workloads that the Pollux paper published, against its published averages.

16 nodes with 4 slots, a decision every 60 s, 30 s for each change of a placement. ELASTUNE_POLLUX_TRACES names the
folder with the paper's measurements. Three levels of information: what a job has measured itself, its declared epochs
as well, and what all jobs that run the same code have measured as well. Settings were chosen on workloads 1 and 3.
"""

from __future__ import annotations

import logging
import os
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.frame import Measurement
from scheduler.simulator.cluster import SimulationSettings
from scheduler.simulator.command import Information, compare
from scheduler.simulator.summary import Summary, summarize
from scheduler.simulator.workload import read_workload

PUBLISHED: dict[str, tuple[float, ...]] = {
    "pollux": (2088.8, 3322.9, 2188.5, 2721.0),
    "tiresias": (2473.7, 5145.0, 3876.3, 3280.3),
    "optimus": (4087.1, 6913.9, 3944.0, 5967.8),
}
"""Seconds, workloads 1 to 4 (artifact of Qiao et al., OSDI'21)."""
PUBLISHED_P99 = (39105.0, 43324.0, 14570.0, 51976.0)
PUBLISHED_MAKESPAN = (64849.0, 56644.0, 36806.0, 64694.0)
MEASURED_PAUSE_SECONDS = 1.0
"""Most seconds that a rescale costs here: tens of milliseconds for survivors, a second for a loss."""


def _run(policy: str, information: Information, settings: SimulationSettings) -> list[Summary]:
    traces = Path(os.environ["ELASTUNE_POLLUX_TRACES"])
    found = []
    for number in range(1, 5):
        jobs = read_workload(traces / "workloads" / f"workload-{number}.csv", traces)
        found.append(summarize(compare(jobs, [policy], settings, information)[0]))
        print(f"  {policy} {information} workload {number}: {found[-1].mean_completion:.0f} s", flush=True)
    return found


def _row(what: str, found: list[Summary], published: tuple[float, ...], peer: str, target: float | None) -> Measurement:
    details: dict[str, Any] = {
        "mean_by_workload": [row.mean_completion for row in found],
        "p99_of_published": [row.p99_completion / p99 for row, p99 in zip(found, PUBLISHED_P99, strict=True)],
        "makespan_of_published": [row.makespan / span for row, span in zip(found, PUBLISHED_MAKESPAN, strict=True)],
        "rescales_per_job": [row.rescales_per_job for row in found],
    }
    return Measurement(
        what=what,
        ours=statistics.fmean(row.mean_completion for row in found),
        peer=statistics.fmean(published),
        unit="s",
        peer_name=peer,
        target=target,
        details=details,
    )


def measure() -> list[Measurement]:
    logging.disable(logging.ERROR)
    if "ELASTUNE_POLLUX_TRACES" not in os.environ:
        print("set ELASTUNE_POLLUX_TRACES to the folder of Pollux's measurements; nothing was run")
        return []
    settings = SimulationSettings()
    rows = [
        _row(f"{name}, as published", _run(name, "own", settings), PUBLISHED[name], f"{name}, published", 1.02)
        for name in ("tiresias", "optimus", "pollux")
    ]
    targets: dict[Information, float | None] = {"own": None, "declared": 0.84, "pooled": 0.78}
    for information, target in targets.items():
        found = _run("goodput", information, settings)
        rows.append(
            _row(f"goodput, information {information}", found, PUBLISHED["pollux"], "pollux, published", target)
        )
    found = _run("goodput", "pooled", replace(settings, rescale_seconds=MEASURED_PAUSE_SECONDS))
    rows.append(_row("goodput, pooled, measured pause", found, PUBLISHED["pollux"], "pollux, published", 0.74))
    return rows
