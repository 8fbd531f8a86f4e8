"""Slots that were asked for elsewhere, such as of a queue, and have not come yet."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class QueuedSlots:
    slots: int
    where: str
    expected_in: float | None
    """Seconds until the first of them come, where something is known of that."""
    trouble: str = ""
    """Why no more are asked for, for people."""


@dataclass(frozen=True, slots=True)
class SlotQuota:
    """Most slots that some trials may hold together, however many there are."""

    name: str
    """Trials that share it name it alike."""
    slots: int
    sentence: str
    """Sentence for those for whom nothing is left of it."""
