"""Slots that were asked for elsewhere, such as of a queue, and have not come yet."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class QueuedSlots:
    """So many at one place."""

    slots: int
    where: str
    expected_in: float | None
    """Seconds until the first of them come, where something is known of that."""
    trouble: str = ""
    """Why no more are asked for, for people."""
