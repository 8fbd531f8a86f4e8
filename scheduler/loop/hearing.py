"""Liveness of replicas: when each last called, and which have been silent for too long.

A process that is stopped, or stuck below Python, still exists, and its peers wait for it in vain. Nobody is silent who
could not be heard: while the scheduler was stopped or waited for its disk, time does not count. All times are of a
clock that does not jump.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from trials.record import ReplicaRecord

DEAF_SECONDS = 5.0
"""Two looks that lie further apart: the scheduler itself was held up."""


class Hearing:
    """Calls are noted by threads that serve the API; the control loop looks."""

    def __init__(self, monotonic: Callable[[], float], silence_seconds: float) -> None:
        self._monotonic = monotonic
        self._silence_seconds = silence_seconds
        self._heard: dict[str, float] = {}
        self._listening_since = self._looked_at = monotonic()

    def note(self, replica_id: str) -> None:
        self._heard[replica_id] = self._monotonic()

    def was_deaf(self) -> None:
        """Nobody could be heard until now."""
        self._listening_since = self._monotonic()

    def look(self) -> bool:
        """Note a look of the loop; return False when the one before lies too far back."""
        held_up = self._monotonic() - self._looked_at > DEAF_SECONDS
        if held_up:
            self.was_deaf()
        self._looked_at = self._monotonic()
        return not held_up

    def silent(self, replicas: Iterable[ReplicaRecord]) -> list[ReplicaRecord]:
        """Return replicas that have called before but not for too long; each is named once."""
        now = self._monotonic()
        by_id = {replica.replica_id: replica for replica in replicas}
        for replica_id in self._heard.keys() - by_id.keys():
            self._heard.pop(replica_id, None)
        for replica in by_id.values():
            if replica.contact_at is not None:
                # Of those that an earlier scheduler has started, too.
                self._heard.setdefault(replica.replica_id, now)
        found = []
        for replica_id, heard in list(self._heard.items()):
            if now - max(heard, self._listening_since) > self._silence_seconds:
                del self._heard[replica_id]
                found.append(by_id[replica_id])
        return found
