"""Backing: what keeps a store's trials, and the facts about a trial that a store has besides its record."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from trials.record import Measurement, Reason, ReplicaRecord, ReplicaState, Report, Study, TrialRecord
from trials.spec import TrialSpec

if TYPE_CHECKING:
    from trials.store.memory import TrialStore

RESIZE = " replicas"
"""End of a history entry that tells of another number of replicas."""
AIM_AGAIN: Mapping[str, Any] = {"state": ReplicaState.LAUNCHED, "join_epoch": None, "retry_join": True}
"""Fields of a joiner's record that is to aim at a later epoch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HistoryEntry:
    """Something that happened to a trial: who changed what, when and why."""

    at: float
    trial_id: str
    what: str
    """A state, ``waits``, ``warning``, or ``1 -> 2 replicas``."""
    reason: Reason
    who: str = "scheduler"
    """``scheduler``, ``policy NAME``, ``trial``, ``tuner``, ``owner`` (of the token), or a replica's id."""
    numbers: Mapping[str, float] = field(default_factory=dict)
    """Numbers that were weighed, by names for people."""

    @property
    def resizes(self) -> bool:
        return self.what.endswith(RESIZE)


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotInterval:
    """A slot held by a replica from ``began`` to ``ended`` (None: still held)."""

    node: str
    slot: int
    trial_id: str
    replica_id: str
    began: float
    ended: float | None

    @classmethod
    def of(cls, replica: Any) -> SlotInterval:
        """Make one from a replica's record, or a row with the same names."""
        return cls(
            node=replica.node,
            slot=replica.slot,
            trial_id=replica.trial_id,
            replica_id=replica.replica_id,
            began=replica.launched_at,
            ended=replica.gone_at,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreContent:
    """Contents of a backing that a store needs in memory."""

    studies: Sequence[Study]
    trials: Sequence[TrialRecord]
    """Trials in order of submission."""
    live_replicas: Sequence[ReplicaRecord]
    reports: Mapping[str, Sequence[Report]]
    """Reports by study."""
    hints: Mapping[str, dict[str, Any]]
    """Hints by trial, of those that are not over."""
    resizes: Sequence[HistoryEntry]


class Backing:
    """Keeps what a store has decided: it knows no rule. Writes raise StoreUnavailable when they fail.

    Within ``changing`` a write is durable when it returns; within ``noting`` it may follow later. What is returned is
    what was kept, where a backing may have something to say about that. This one keeps nothing: its store is outlived
    by nobody.
    """

    def __init__(self) -> None:
        self._changing = threading.RLock()
        self._numbers = itertools.count()

    @property
    def archive(self) -> Archive | None:
        return None

    def load(self, memory: TrialStore) -> None:
        """Load everything that is kept into ``memory``, once at the start; later the backing updates it itself."""

    def catch_up(self) -> None:
        """Bring memory up to date before it is read, if a write has failed since."""

    def changing(self, trial_ids: Sequence[str] = ()) -> AbstractContextManager[object]:
        """Return what a thread holds while it decides and writes a change of these trials; none: of what else there is.

        Memory holds what is kept when it begins.
        """
        return self._changing

    def noting(self) -> AbstractContextManager[object]:
        """Return the lock for writes that may be lost, such as measurements."""
        return self._changing

    def name_of(self, spec: TrialSpec) -> str:
        """Return the id of a trial that is to be made."""
        # The simulator's trials have the same names at every run.
        return f"t{next(self._numbers):010d}"

    def save_study(self, study: Study) -> Study:
        return study

    def save_lease(self, study: Study) -> None: ...

    def add_trial(self, record: TrialRecord) -> TrialRecord:
        return record

    def save_trials(self, records: Sequence[TrialRecord]) -> Sequence[TrialRecord]:
        return records

    def add_replica(self, replica: ReplicaRecord) -> None: ...

    def save_replicas(self, replicas: Sequence[ReplicaRecord], fields: Sequence[str]) -> None:
        """Write the named fields of these replicas' records."""

    def save_hints(self, trial_id: str, hints: Mapping[str, Any], measured: Measurement | None) -> None: ...

    def append(self, fact: Report | HistoryEntry) -> None: ...

    def forget_trials(self, trial_ids: Sequence[str]) -> None: ...

    def forget_study(self, name: str) -> None: ...

    def close(self) -> None: ...


class Archive(Protocol):
    """A backing that answers what its store does not keep in memory."""

    def replicas(self, *, trial_id: str | None = None, live_only: bool = True) -> list[ReplicaRecord]: ...

    def hints(self, trial_ids: Sequence[str]) -> dict[str, dict[str, Any]]: ...

    def measurements(self, trial_id: str) -> list[Measurement]: ...

    def history(self, trial_id: str) -> list[HistoryEntry]: ...

    def recent_history(
        self, *, limit: int, until: float | None = None, study: str | None = None
    ) -> list[HistoryEntry]: ...
