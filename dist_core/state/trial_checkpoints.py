"""A trial's checkpoints as its core uses them: find the newest, write one when it is due, know what that costs."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import statistics
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from dist_core.life import Listener
from dist_core.state.checkpoint import CheckpointWriter, flush, load_checkpoint, write_checkpoint
from dist_core.state.manifests import checkpoints_of, is_flushed, part_folder
from dist_core.state.parts import ALONE, Readers, merged, newest_in_parts

logger = logging.getLogger(__name__)


FIRST_SECONDS = 0.25
"""The first checkpoint of a run is written once it has trained that long."""


class TrialCheckpoints(Listener):
    """Nothing is written, and nothing found, where ``folder`` is None.

    ``part``: number of this process among those that write a checkpoint together.
    """

    def __init__(
        self,
        folder: Path | None,
        part: int = 0,
        *,
        on_error: Callable[[str], None],
        on_written: Callable[[], None] = lambda: None,
    ) -> None:
        self.folder = folder
        self.came_from_parent = False
        """The checkpoint that was loaded is another trial's, with whose state this one begins."""
        self._part = part
        self._on_error = on_error
        self.interval_seconds: float | None = None
        """Time between two of them as the user sets it; None to weigh their cost against failures."""
        mine = folder if folder is None else part_folder(folder, part)
        self._writer = None if mine is None else CheckpointWriter(mine, on_error=on_error, on_written=on_written)
        self._last: float | None = None
        self._costs: deque[float] = deque(maxlen=9)
        self._failures = self._came_from_failure = 0
        self._trained_before = 0.0
        self._trains_since: float | None = None
        self._unflushed: Path | None = None
        """The checkpoint that was loaded, where it came from another trial's memory."""

    def entered(self, rank: int, number: int) -> None:
        if self._trains_since is None:
            self._trains_since = time.monotonic()

    def step_ended(self) -> None:
        # Not before: the first step is waited for, and the checksum would take a core from it.
        if self._unflushed is not None:
            threading.Thread(target=_flush_quietly, args=(self._unflushed,), name="elastune-flush", daemon=True).start()
            self._unflushed = None

    @property
    def trained_seconds(self) -> float:
        """Time that this trial has trained, in all its runs."""
        running = 0.0 if self._trains_since is None else time.monotonic() - self._trains_since
        return self._trained_before + running

    @property
    def has_any(self) -> bool:
        return self.folder is None or bool(checkpoints_of(self.folder))

    def load_newest(self, readers: Readers = ALONE) -> dict[str, Any] | None:
        """Return the state of the newest checkpoint that verifies; one that was not its run's last is a failure.

        Of one that several processes have written: theirs together (``parts``).
        """
        found = newest_in_parts(self.folder, readers) if self.folder is not None else None
        if found is None:
            return None
        paths, manifest = found
        path = paths[0]
        if not manifest["summary"].get("left", False):
            self._came_from_failure = 1
        parent = manifest["summary"].get("parent", "")
        self.came_from_parent = bool(parent)
        logger.info(
            "resumed checkpoint=%s epoch=%d%s",
            path.name,
            manifest["summary"]["epoch"],
            f" of parent={parent}" if parent else "",
        )
        # Of the parts of a state that is divided, a process copies the rows that it holds itself.
        in_place = len(paths) > 1 or not is_flushed(manifest)
        states = merged([load_checkpoint(path, in_place=in_place) for path in paths])
        if not is_flushed(manifest) and self._part < len(paths):
            self._unflushed = paths[self._part]
        return states

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

    def keep_apart(self, name: str, state: dict[str, Any], summary: dict[str, Any]) -> None:
        """Write a state apart from the others; a failure is told, and costs nothing else."""
        if self.folder is None:
            return
        try:
            write_checkpoint(part_folder(self.folder / name, self._part), 1, state, {**summary, "left": True})
        except OSError as error:
            self._on_error(f"a state that is to be kept was not written to {self.folder / name}: {error}")

    def settle(self) -> None:
        """Wait until the weights have been copied: they are about to change."""
        if self._writer is not None:
            self._writer.settle()

    def state_dict(self) -> dict[str, Any]:
        return {"failures": self._failures, "trained_seconds": self.trained_seconds}

    def inherit(self, state: dict[str, Any]) -> None:
        """Leave a parent's failures and training time out: they are not this trial's."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._failures = state["failures"] + self._came_from_failure
        self._came_from_failure = 0
        self._trained_before = state["trained_seconds"]
        self._trains_since = None if self._trains_since is None else time.monotonic()


def _flush_quietly(path: Path) -> None:
    """Have a state that came from another trial's memory outlive the machine, unless a newer one has by now."""
    with contextlib.suppress(OSError, ValueError):
        flush(path)


SHORTEST_SECONDS = 1.0
LONGEST_SECONDS = 600.0
BELIEVED_SECONDS = 4 * 3600.0
"""Mean time to failure that is assumed before anything is known."""
BELIEF = 0.25
"""Weight of the assumed mean time to failure, as a number of failures."""


def mean_time_to_failure(*, failures: int, trained_seconds: float) -> float:
    return (BELIEF * BELIEVED_SECONDS + trained_seconds) / (BELIEF + failures)


def checkpoint_interval(*, cost_seconds: float, failures: int, trained_seconds: float) -> float:
    """Seconds of training between the starts of two checkpoints."""
    cost = max(cost_seconds, 0.0)
    mean = mean_time_to_failure(failures=failures, trained_seconds=trained_seconds)
    if cost >= 2.0 * mean:
        interval = mean
    else:
        ratio = cost / (2.0 * mean)
        interval = math.sqrt(2.0 * cost * mean) * (1.0 + math.sqrt(ratio) / 3.0 + ratio / 9.0) - cost
    return min(LONGEST_SECONDS, max(SHORTEST_SECONDS, interval))
