"""Largest atomic batch that this trial's devices hold with each layout, learned from failed allocations.

Kept beside the trial's checkpoints, so that replicas that start later, and survivors after a switch, know it too.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import torch

SHRINK = 0.75
"""Share of the batch that did not fit: memory is nearly linear in it, and a second failure costs more than the rest."""
_FILE = "memory-limit.json"


class MemoryLimit:
    """Memory limit of a trial whose checkpoints are in ``folder``; None for one that has none.

    ``layout``: how its replicas hold the model now (``dist_core.layout``), by name; empty where that is no choice.
    """

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self.layout = ""
        self._known = _read(folder)

    @property
    def most_examples(self) -> int | None:
        """Return the most examples of a pass after a larger one ran out of memory on any of the trial's replicas."""
        return (_read(self._folder) or self._known).get(self.layout) or None

    @property
    def hopeless(self) -> frozenset[str]:
        """Layouts with which not even the smallest batch fits."""
        return frozenset(name for name, most in (_read(self._folder) or self._known).items() if most == 0)

    def lower(self, atomic_batch: int, smallest: int) -> int | None:
        """Return the bound after ``atomic_batch`` examples did not fit.

        None when there is nothing left to give up.
        """
        if atomic_batch <= smallest:
            return None
        return self._note(max(smallest, min(atomic_batch - 1, int(atomic_batch * SHRINK))))

    def give_up_layout(self) -> None:
        self._note(0)

    def _note(self, most: int) -> int:
        self._known = {**self._known, **_read(self._folder), self.layout: most}
        _write(self._folder, self._known)
        return most


def is_out_of_memory(error: BaseException) -> bool:
    """Tell whether an allocation failed, on a GPU or on the host."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and "can't allocate memory" in str(error)


def _read(folder: Path | None) -> dict[str, int]:
    """Return the bounds as this trial knows them, by layout; none when it never ran out, or the note cannot be read."""
    if folder is None:
        return {}
    try:
        document = json.loads((folder / _FILE).read_text())
        limits = {"": document["max_atomic"]} if "max_atomic" in document else document["by_layout"]
        return {str(name): most for name, most in limits.items() if isinstance(most, int) and most >= 0}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}


def _write(folder: Path | None, limits: dict[str, int]) -> None:
    """Write the bounds; the file is replaced as a whole, so that a reader sees the old ones or the new ones."""
    if folder is None:
        return
    folder.mkdir(parents=True, exist_ok=True)
    partial = folder / f"{_FILE}.{os.getpid()}"
    with open(partial, "w") as file:
        json.dump({"by_layout": limits}, file)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(folder / _FILE)
