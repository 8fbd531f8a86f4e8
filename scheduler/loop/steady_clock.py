"""Seconds since the epoch that never jump: the wall clock when this process started, and what has passed since then.

Deadlines and leases are compared with it, so that neither a corrected clock nor a machine that was suspended makes them
run out or last. After a restart it follows the wall clock anew.
"""

from __future__ import annotations

import time
from collections.abc import Callable


class SteadyClock:
    def __init__(self, wall: Callable[[], float] = time.time, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._monotonic = monotonic
        self._offset = wall() - monotonic()

    def __call__(self) -> float:
        return self._offset + self._monotonic()
