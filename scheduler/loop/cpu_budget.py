"""How much of a core the control loop may use: a share of it in the long run, and more where much happens at once."""

from __future__ import annotations

SHARE = 0.2
"""Of a core."""
MOST_SAVED_SECONDS = 1.0
"""Of CPU time that was not used, kept for when it is."""


class CpuBudget:
    """Times are of a clock that does not jump, in seconds."""

    def __init__(self, now: float) -> None:
        self._saved = MOST_SAVED_SECONDS
        self._counted_at = now

    def rest_after(self, used: float, now: float) -> float:
        """Seconds to rest when so much CPU time has been used since the last call."""
        earned = SHARE * (now - self._counted_at)
        self._counted_at = now
        self._saved = min(MOST_SAVED_SECONDS, self._saved + earned) - used
        return max(0.0, -self._saved / SHARE)
