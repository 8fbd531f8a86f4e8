"""Check that a process which was a replica may become another one: nothing of what ran in it may stay behind.

Starting a process and importing what an objective needs takes longer than many an objective takes that trains nothing.
Such processes go on with the next trial of their study. torch keeps too much (devices, memory, defaults) for that.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from dataclasses import dataclass

from dist_core.link.environment import WATCH_THREAD

MOST_TRIALS = 1000
GROWTH = 1.5
GROWTH_BYTES = 100 << 20
"""Most growth of memory after the first trial: more than that is a leak, or other data."""
ENDING_SECONDS = 0.2
"""Seconds for the replica's own threads to end."""


class _Wish:
    keep = False


def keep_process() -> None:
    """Keep this process for the study's next replica; the entrypoint says so before it returns 0."""
    _Wish.keep = True


@dataclass(slots=True)
class Keeping:
    """One process, over the replicas that it has been."""

    trials: int = 0
    first_bytes: int = 0

    def begin(self) -> None:
        _Wish.keep = False
        self.trials += 1

    def may_go_on(self) -> bool:
        """Asked when that has ended with status 0."""
        if not _Wish.keep or "torch" in sys.modules or self.trials >= MOST_TRIALS:
            return False
        return not self._has_grown() and not _has_children() and not _has_threads()

    def _has_grown(self) -> bool:
        now = _resident_bytes()
        self.first_bytes = self.first_bytes or now
        return now > GROWTH * self.first_bytes + GROWTH_BYTES


def _resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _has_children() -> bool:
    try:
        while os.waitpid(-1, os.WNOHANG) != (0, 0):
            pass
    except ChildProcessError:
        return False
    return True


def _has_threads() -> bool:
    deadline = time.monotonic() + ENDING_SECONDS
    while others := [each for each in threading.enumerate() if each is not threading.main_thread()]:
        # It does nothing more with the answer.
        if all(each.name == WATCH_THREAD for each in others):
            return False
        if time.monotonic() > deadline:
            return True
        others[0].join(0.005)
    return False
