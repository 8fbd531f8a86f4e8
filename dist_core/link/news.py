"""News of a trial beside its training: warnings, announcements, hints, and the times that they hold."""

from __future__ import annotations

import logging
import statistics
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from dist_core.goodput import Hints
from dist_core.life import Listener
from dist_core.link.hints_sender import HintsSender

logger = logging.getLogger(__name__)

LEAST_FRACTION = 0.05
"""Least fraction of the first epoch from which its whole length can be told."""


class News(Listener):
    """News of a trial for its scheduler: warnings, announcements, hints, and times.

    ``sender``: None where nobody listens; what is warned of is in the log all the same.
    """

    def __init__(self, sender: HintsSender | None) -> None:
        self._sender = sender
        self._pauses: deque[float] = deque(maxlen=9)
        self._epoch_seconds: deque[float] = deque(maxlen=5)
        self._epoch_began: float | None = None

    # ------------------------------------------------------------------ what is sent

    def warn(self, message: str) -> None:
        """Write a sentence into the trial's history and its log."""
        logger.warning(message)
        if self._sender is not None:
            self._sender.warn(message)

    def announce(self, path: str, body: dict[str, Any]) -> None:
        """Tell the scheduler; it finds out by itself if this fails, only later."""
        if self._sender is not None:
            self._sender.post_in_order(path, body)

    def hint(self, compose: Callable[[], Hints | None], generation: int, *, is_last: bool = False) -> None:
        """Tell how training goes, where it is time for that, or a trial ends that has not told its speed."""
        if self._sender is not None and (self._sender.due or (is_last and not self._sender.has_told_speed)):
            hints = compose()
            if hints is not None:
                self._sender.post_later(
                    {"generation": generation, "hints": hints.to_json()}, says_speed=bool(hints.observations)
                )

    def flush(self) -> None:
        if self._sender is not None:
            self._sender.flush()

    # ------------------------------------------------------------------ what takes how long

    @property
    def pauses(self) -> tuple[float, ...]:
        """Seconds that this replica stopped at its latest switches, oldest first."""
        return tuple(self._pauses)

    @property
    def typical_pause(self) -> float | None:
        return statistics.median(self._pauses) if self._pauses else None

    def note_pause(self, seconds: float) -> None:
        self._pauses.append(seconds)
        if self._sender is not None:
            self._sender.hurry()

    def entered(self, rank: int, number: int) -> None:
        self._epoch_began = self._epoch_began or time.monotonic()

    def epoch_ended(self) -> None:
        now = time.monotonic()
        if self._epoch_began is not None:
            self._epoch_seconds.append(now - self._epoch_began)
        self._epoch_began = now

    def typical_epoch_seconds(self, fraction: float) -> float | None:
        """Median of the latest epochs; in the first one, from the ``fraction`` of it that has been trained."""
        if self._epoch_seconds:
            return statistics.median(self._epoch_seconds)
        if self._epoch_began is None or fraction < LEAST_FRACTION:
            return None
        return (time.monotonic() - self._epoch_began) / fraction
