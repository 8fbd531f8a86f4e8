"""Importing the goodput model, as the scheduler does, against importing torch."""

from __future__ import annotations

import statistics
import subprocess
import sys
import time

from benchmarks.frame import Measurement


def seconds(statement: str) -> float:
    times = []
    for _ in range(7):
        began = time.perf_counter()
        subprocess.run([sys.executable, "-c", statement], check=True)
        times.append(time.perf_counter() - began)
    return statistics.median(times)


def measure() -> list[Measurement]:
    bare = seconds("pass")
    ours = seconds("import dist_core.goodput, sys; assert 'torch' not in sys.modules") - bare
    return [
        Measurement(what="import dist_core.goodput", ours=ours, peer=0.2, unit="s", peer_name="the goal", target=1.0),
        Measurement(
            what="import dist_core.goodput",
            ours=ours,
            peer=seconds("import torch") - bare,
            unit="s",
            peer_name="import torch",
        ),
    ]
