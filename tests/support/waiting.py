"""How tests wait for what other threads and processes do."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

Found = TypeVar("Found")
SHORTEST_SECONDS, LONGEST_SECONDS = 0.002, 0.1
"""Between two looks, which come less often the longer it takes: they may cost a process each."""


def until(
    look: Callable[[], Found | None], seconds: float = 60.0, what: str | Callable[[], str] = "what a test waits for"
) -> Found:
    """The first true value of ``look``; fails with what was waited for when there is none in time."""
    deadline, pause = time.monotonic() + seconds, SHORTEST_SECONDS
    while True:
        found = look()
        if found:
            return found
        assert time.monotonic() < deadline, f"waited {seconds:g} s: {what if isinstance(what, str) else what()}"
        time.sleep(pause)
        pause = min(LONGEST_SECONDS, 1.2 * pause)
