"""TornReplicas: since when replicas of several processes have lacked one of them."""

from __future__ import annotations

from collections.abc import Sequence

from trials.record import ReplicaRecord, TrialRecord
from trials.replicas import whole_replicas

PATIENCE_SECONDS = 5.0
"""Those that are left of one end by themselves, or have just done all there was to do."""


class TornReplicas:
    def __init__(self) -> None:
        self._since: dict[str, dict[str, float]] = {}

    def look(self, trial: TrialRecord, rows: Sequence[ReplicaRecord], now: float) -> frozenset[str]:
        """Processes of the trial's ``rows`` that have been left by others of their replica for too long."""
        if trial.spec.slots_per_replica == 1:
            return frozenset()
        before = self._since.get(trial.trial_id, {})
        _, torn = whole_replicas(rows, trial.spec.slots_per_replica)
        since = {row.replica_id: before.get(row.replica_id, now) for row in torn}
        self._since[trial.trial_id] = since
        return frozenset(name for name, at in since.items() if now - at > PATIENCE_SECONDS)

    def forget(self, trial_id: str) -> None:
        """The trial is over."""
        self._since.pop(trial_id, None)
