"""TornReplicas: since when replicas of several processes have lacked one of them."""

from __future__ import annotations

from collections.abc import Sequence

from dist_core.exit_statuses import EXIT_PREEMPTED
from trials.record import ReplicaRecord, TrialRecord
from trials.replicas import replica_number, whole_replicas

PATIENCE_SECONDS = 5.0
"""Those that are left of one notice it and end by themselves."""


class TornReplicas:
    def __init__(self) -> None:
        self._since: dict[str, dict[str, float]] = {}

    def look(
        self, trial: TrialRecord, rows: Sequence[ReplicaRecord], all_rows: Sequence[ReplicaRecord], now: float
    ) -> frozenset[str]:
        """Processes of the trial's ``rows`` that others of their replica have been lost beside for too long.

        ``all_rows``: those that are gone among them. Of one that has come to its end, or leaves with a checkpoint, the
        others may still do what is theirs.
        """
        before = self._since.get(trial.trial_id, {})
        size = trial.slots_per_replica

        def replica_of(row: ReplicaRecord) -> tuple[float, int]:
            if row.replica_id in trial.members:
                # Those of one replica may have been launched at different moments, before it had its layout.
                return 0.0, trial.members.index(row.replica_id) // size
            # A number is used again, but not by what is launched at the same moment.
            return row.launched_at, replica_number(row, size)

        _, torn = whole_replicas(rows, size)
        left = {replica_of(row) for row in all_rows if row.exit_status in (0, EXIT_PREEMPTED)}
        since = {row.replica_id: before.get(row.replica_id, now) for row in torn if replica_of(row) not in left}
        self._since[trial.trial_id] = since
        return frozenset(name for name, at in since.items() if now - at > PATIENCE_SECONDS)

    def forget(self, trial_id: str) -> None:
        """The trial is over."""
        self._since.pop(trial_id, None)
