"""Says what a sweep's first trial waits for, as long as there is nothing else to be seen."""

from __future__ import annotations

import time
from collections.abc import Callable

PATIENCE_SECONDS = 2.0
"""Trials begin within this time where nothing is in their way."""


class FirstWords:
    """``reason``: what the scheduler says of the trial at the moment. ``tell``: where people read it."""

    def __init__(
        self, reason: Callable[[], str], tell: Callable[[str], None], *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._reason = reason
        self._tell = tell
        self._clock = clock
        self._looks_at = clock() + PATIENCE_SECONDS
        self._said = ""

    def look(self) -> None:
        """Again and again until the trial has begun; each reason is told once."""
        now = self._clock()
        if now < self._looks_at:
            return
        self._looks_at = now + PATIENCE_SECONDS
        reason = self._reason()
        if reason != self._said:
            self._said = reason
            self._tell(f"elastune: the first trial has not begun yet: {reason}")
