"""What is prepared in tests, and by whom."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from dist_core import prepared
from dist_core.preparation.prepare import Part
from dist_core.preparation.shards import PreparedData

ROWS, PARTS = 60, 12


def noted(folder: str, part: Part) -> None:
    with open(Path(folder) / "made", "a") as file:
        file.write(f"{part.index}\n")


def squares(part: Part, folder: str, seconds: float = 0.0) -> Iterator[dict[str, Any]]:
    """Notes each part that it is asked for."""
    noted(folder, part)
    time.sleep(seconds)
    for number in part.of(ROWS):
        yield {"number": number, "square": np.full((2, 3), number * number, dtype=np.float32)}


def stuck_in_one(part: Part, folder: str, stuck: int) -> Iterator[dict[str, Any]]:
    """The first to make that part never ends."""
    noted(folder, part)
    if part.index == stuck and not (Path(folder) / "stuck").exists():
        (Path(folder) / "stuck").write_text(str(os.getpid()))
        time.sleep(600)
    for number in part.of(ROWS):
        yield {"number": number}


def by_process(home: str, folder: str, seconds: float) -> list[int]:
    data = prepared("squares", squares, arguments={"folder": folder, "seconds": seconds}, parts=PARTS, folder=home)
    return [row["number"] for row in data]  # type: ignore[attr-defined]  # a sequence by its items


def one_that_gets_stuck(home: str, folder: str) -> list[int]:
    data = prepared("stuck", stuck_in_one, arguments={"folder": folder, "stuck": 3}, parts=PARTS, folder=home)
    return numbers(data)


def numbers(data: PreparedData) -> list[int]:
    return [data[index]["number"] for index in range(len(data))]


def objective(trial: Any) -> float:
    """Of a trial that wants data before anything else."""
    scale: float = trial.suggest_float("scale", 1.0, 2.0)
    data = prepared("squares", squares, arguments={"folder": os.environ["PREPARED_NOTES"], "seconds": 0.1}, parts=PARTS)
    return scale * sum(numbers(data))
