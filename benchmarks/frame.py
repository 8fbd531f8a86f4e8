"""Parts that all benchmarks share: medians, ratios against a peer of the same run, and a JSON file a run."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """One row of a benchmark's table."""

    what: str
    ours: float
    peer: float
    unit: str
    peer_name: str
    lower_is_better: bool = True
    target: float | None = None
    """Largest (or, where higher is better, smallest) ratio ours / peer that meets the goal."""
    details: dict[str, Any] = field(default_factory=dict)

    @property
    def ratio(self) -> float:
        return self.ours / self.peer

    @property
    def meets_target(self) -> bool | None:
        if self.target is None:
            return None
        return self.ratio <= self.target if self.lower_is_better else self.ratio >= self.target


Benchmark = Callable[[], list[Measurement]]


def environment() -> dict[str, Any]:
    """Return the machine and the versions that the figures depend on."""
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False, cwd=RESULTS.parent
    )
    return {
        "when": time.strftime("%Y-%m-%d %H:%M:%S"),
        "commit": commit.stdout.strip(),
        "python": platform.python_version(),
        "cores": len(os.sched_getaffinity(0)),
        "load": os.getloadavg(),
        "omp_num_threads": os.environ.get("OMP_NUM_THREADS"),
    }


def run(name: str, benchmark: Benchmark) -> list[Measurement]:
    """Run one benchmark, print its table, write ``results/NAME.json``."""
    before = environment()
    rows = benchmark()
    RESULTS.mkdir(exist_ok=True)
    document = {"environment": before, "rows": [{**asdict(row), "ratio": row.ratio} for row in rows]}
    (RESULTS / f"{name}.json").write_text(json.dumps(document, indent=2))
    print_table(name, rows)
    return rows


def print_table(name: str, rows: Sequence[Measurement]) -> None:
    print(f"\n{name}")
    for row in rows:
        verdict = {None: "", True: "  (meets target)", False: f"  (target {row.target})"}[row.meets_target]
        print(
            f"  {row.what}: {row.ours:.3g} {row.unit} against {row.peer:.3g} {row.unit} of {row.peer_name}: "
            f"ratio {row.ratio:.3f}{verdict}"
        )
