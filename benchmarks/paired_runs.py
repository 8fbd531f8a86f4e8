"""Rows of a trainer's step times against its own, made in turns by the same processes: one replica, and two ranks."""

from __future__ import annotations

import statistics
from collections.abc import Callable

from benchmarks.frame import Measurement
from benchmarks.ranks import run_ranks

TARGET = 1.03


def rows_of(times_of: Callable[[int, int], dict[str, list[float]]], *, what: str, peer: str) -> list[Measurement]:
    """``times_of``: seconds of each run, "ours" and "plain", of a rank of so many; a row is their median ratio."""
    rows = []
    for world_size in (1, 2):
        times = run_ranks(times_of, world_size)
        ratio = statistics.median(ours / plain for ours, plain in zip(times["ours"], times["plain"], strict=True))
        milliseconds = 1e3 * statistics.median(times["plain"])
        rows.append(
            Measurement(
                what=f"{what}, {world_size} replica{'s' * (world_size > 1)}",
                ours=milliseconds * ratio,
                peer=milliseconds,
                unit="ms",
                peer_name=peer + " over DDP" * (world_size > 1),
                target=TARGET,
            )
        )
        print(rows[-1].what, f"{rows[-1].ratio:.3f} (target {TARGET})", flush=True)
    return rows
