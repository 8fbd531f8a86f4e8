"""A trial's checkpoints as its core uses them: find the newest, write one when it is due, know what that costs."""

from __future__ import annotations

import logging
import os
import statistics
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from dist_core.state.checkpoint import CheckpointWriter, load_checkpoint
from dist_core.state.interval import checkpoint_interval
from dist_core.state.parts import ALONE, Readers, merged, newest_in_parts, part_folder

logger = logging.getLogger(__name__)


FIRST_SECONDS = 0.25
"""The first checkpoint of a run is written once it has trained that long."""


class TrialCheckpoints:
    """Nothing is written, and nothing found, where ``folder`` is None.

    ``part``: of the processes that write one together, this one's number.
    """

    def __init__(self, folder: Path | None, part: int = 0, *, on_error: Callable[[str], None]) -> None:
        self.folder = folder
        self.interval_seconds: float | None = None
        """Time between two of them as the user sets it; None to weigh their cost against failures."""
        self._on_error = on_error
        self._writer: CheckpointWriter | None = None
        self._before: CheckpointWriter | None = None
        """Of the part that this process had before."""
        self.write_part(part)
        self._last: float | None = None
        self._costs: deque[float] = deque(maxlen=9)
        self._failures = self._came_from_failure = 0
        self._trained_before = 0.0
        self._trains_since: float | None = None

    def write_part(self, number: int) -> None:
        """From now on this process is that one of those that write a checkpoint together."""
        if self.folder is None:
            return
        mine = part_folder(self.folder, number)
        if self._writer is not None and self._writer.folder == mine:
            return
        if self._writer is not None:
            self._writer.close()
        self._before, self._writer = self._writer, CheckpointWriter(mine, on_error=self._on_error)

    def note_written(self) -> None:
        """By others: this process's own is due when one of theirs would be."""
        self._last = time.monotonic()

    def training_begins(self) -> None:
        if self._trains_since is None:
            self._trains_since = time.monotonic()

    @property
    def trained_seconds(self) -> float:
        """Time that this trial has trained, in all its runs."""
        running = 0.0 if self._trains_since is None else time.monotonic() - self._trains_since
        return self._trained_before + running

    def load_newest(self, readers: Readers = ALONE) -> dict[str, Any] | None:
        """The state of the newest one that verifies; coming from one that was not its run's last is a failure.

        Of one that several processes have written: theirs together (``parts``).
        """
        found = newest_in_parts(self.folder, readers) if self.folder is not None else None
        if found is None:
            return None
        paths, manifest = found
        path = paths[0]
        if not manifest["summary"].get("left", False):
            self._came_from_failure = 1
        logger.info("resumed checkpoint=%s epoch=%d", path.name, manifest["summary"]["epoch"])
        # Of the parts of a state that is divided, a process copies the rows that it holds itself.
        return merged([load_checkpoint(path, in_place=len(paths) > 1) for path in paths])

    @property
    def is_writing(self) -> bool:
        """Also of a part that this process has no more."""
        return any(each is not None and each.busy for each in (self._before, self._writer))

    @property
    def is_busy(self) -> bool:
        return self._writer is not None and self._writer.busy

    @property
    def is_due(self) -> bool:
        if self._writer is None or self._writer.busy:
            return False
        if self._last is None:
            # A trial that is killed early would begin at its beginning.
            return self.trained_seconds - self._trained_before >= FIRST_SECONDS
        return time.monotonic() - self._last >= self._interval(self._writer)

    def _interval(self, writer: CheckpointWriter) -> float:
        if self.interval_seconds is not None:
            return self.interval_seconds
        stopped = statistics.median(self._costs) if self._costs else 0.0
        return checkpoint_interval(
            cost_seconds=stopped + writer.write_seconds / max(1, os.cpu_count() or 1),
            failures=self._failures,
            trained_seconds=self.trained_seconds,
        )

    def save(
        self,
        state: dict[str, Any],
        summary: dict[str, Any],
        *,
        leaving: bool,
        wait: bool,
        keeps: Callable[[torch.Tensor], bool],
    ) -> None:
        """Write the state, in the background unless this is the last thing done or ``wait`` says otherwise."""
        if self._writer is None:
            return
        began = time.perf_counter()
        self._writer.save(state, {**summary, "left": leaving}, wait=leaving or wait, keeps=keeps)
        if not leaving and not wait:
            self._costs.append(time.perf_counter() - began)
        self._last = time.monotonic()

    def settle(self) -> None:
        """Weights are about to change: wait until they have been copied."""
        if self._writer is not None:
            self._writer.settle()

    def state_dict(self) -> dict[str, Any]:
        return {"failures": self._failures, "trained_seconds": self.trained_seconds}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._failures = state["failures"] + self._came_from_failure
        self._came_from_failure = 0
        self._trained_before = state["trained_seconds"]
        self._trains_since = None if self._trains_since is None else time.monotonic()
