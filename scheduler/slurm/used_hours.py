"""Slot hours that a pool's agents were there for, busy or not, over the scheduler's restarts."""

from __future__ import annotations

import contextlib
import json
import logging
from pathlib import Path

from scheduler.state_folder import write_durably
from trials.errors import StoreUnavailable

SAVE_SECONDS = 30.0

logger = logging.getLogger(__name__)


class UsedHours:
    def __init__(self, file: Path) -> None:
        self._file = file
        self._seconds = 0.0
        self._noted_at: float | None = None
        self._saved_at = float("-inf")
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            self._seconds = float(json.loads(file.read_text())["slot_seconds"])

    @property
    def hours(self) -> float:
        return self._seconds / 3600.0

    def note(self, slots: int, now: float) -> None:
        if self._noted_at is not None:
            self._seconds += slots * (now - self._noted_at)
        self._noted_at = now
        if now - self._saved_at > SAVE_SECONDS:
            self._saved_at = now
            self.save()

    def save(self) -> None:
        try:
            write_durably(self._file, json.dumps({"slot_seconds": self._seconds}))
        except StoreUnavailable as error:
            logger.warning("slot hours not kept error=%s", error)
