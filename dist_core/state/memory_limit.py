"""What an allocation that failed has taught: the largest atomic batch this trial's devices hold.

Kept beside the trial's checkpoints, so that replicas that start later, and survivors after a switch, know it too.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import torch

SHRINK = 0.75
"""Of the batch that did not fit: memory use is nearly linear in it, and one more failure costs more than the rest."""
_FILE = "memory-limit.json"


class MemoryLimit:
    """Of a trial whose checkpoints are in ``folder``; None for one that has none."""

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self._known = _read(folder)

    @property
    def most_examples(self) -> int | None:
        """Of a pass, once a larger one has run out of memory; on any of the trial's replicas."""
        return _read(self._folder) or self._known

    def lower(self, atomic_batch: int, smallest: int) -> int | None:
        """The bound after ``atomic_batch`` examples did not fit; None when there is nothing left to give up."""
        if atomic_batch <= smallest:
            return None
        self._known = max(smallest, min(atomic_batch - 1, int(atomic_batch * SHRINK)))
        _write(self._folder, self._known)
        return self._known


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an allocation failed, on a GPU or on the host."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and "can't allocate memory" in str(error)


def _read(folder: Path | None) -> int | None:
    """The bound as this trial knows it; None when it never ran out, or the note cannot be read."""
    if folder is None:
        return None
    try:
        limit = json.loads((folder / _FILE).read_text())["max_atomic"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return limit if isinstance(limit, int) and limit >= 1 else None


def _write(folder: Path | None, max_atomic: int) -> None:
    """Note a bound; replaced as a whole, so a reader sees the old one or the new one."""
    if folder is None:
        return
    folder.mkdir(parents=True, exist_ok=True)
    partial = folder / f"{_FILE}.{os.getpid()}"
    with open(partial, "w") as file:
        json.dump({"max_atomic": max_atomic}, file)
        file.flush()
        os.fsync(file.fileno())
    partial.rename(folder / _FILE)
