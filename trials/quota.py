"""A limit on slots that trials share: their study's, or that of the namespace that their pods are in."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SlotQuota:
    """Most slots that some trials may hold together, however many there are."""

    name: str
    """Trials that share it name it alike."""
    slots: int
    sentence: str
    """What those hear for whom nothing is left of it."""
