"""Backoff: trials that must not be given further replicas yet."""

from __future__ import annotations

LAUNCH_SECONDS = 2.0
"""After a replica of a trial that does not train could not be started."""
FAILED_JOIN_SECONDS = 30.0
"""After a joiner failed, its trial is not grown again for so long."""


class Backoff:
    def __init__(self) -> None:
        self._retry_at: dict[str, float] = {}

    def begin(self, trial_id: str, now: float, seconds: float) -> None:
        self._retry_at[trial_id] = now + seconds

    def holds(self, trial_id: str, now: float) -> bool:
        return now < self._retry_at.get(trial_id, now)

    def trials(self, now: float) -> set[str]:
        return {trial_id for trial_id, until in self._retry_at.items() if now < until}

    def forget(self, trial_id: str) -> None:
        self._retry_at.pop(trial_id, None)
