"""Devices of this machine for replicas: its cores, by NUMA node."""

from __future__ import annotations

import os
from pathlib import Path


def usable_cores() -> tuple[int, ...]:
    if hasattr(os, "sched_getaffinity"):
        return tuple(sorted(os.sched_getaffinity(0)))
    return tuple(range(os.cpu_count() or 1))


def numa_nodes(folder: Path = Path("/sys/devices/system/node")) -> tuple[tuple[int, ...], ...]:
    """The cores of each NUMA node; none where the system does not say."""
    found = []
    for path in sorted(folder.glob("node[0-9]*/cpulist"), key=lambda path: int(path.parent.name.removeprefix("node"))):
        ranges = [part.split("-") for part in path.read_text().strip().split(",") if part]
        found.append(tuple(core for each in ranges for core in range(int(each[0]), int(each[-1]) + 1)))
    return tuple(found)
