"""The contract of a trial store. Every write is durable when the call returns, or raises StoreUnavailable."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from trials.record import Measurement, Outcome, Reason, ReplicaRecord, ReplicaState, Report, Study, TrialRecord
from trials.spec import TrialSpec
from trials.terms import StudyTerms

if TYPE_CHECKING:
    from trials.store.memory import InMemoryTrialStore

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
class Kept:
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


class Backing(Protocol):
    """Keeps what a store has decided: it knows no rule. Writes raise StoreUnavailable when they fail.

    Within ``changing`` a write is durable when it returns; within ``noting`` it may follow later. What is returned is
    what was kept, where a backing may have something to say about that.
    """

    @property
    def archive(self) -> Archive | None: ...

    def load(self, memory: InMemoryTrialStore) -> None:
        """Have memory hold what is kept; called once, and the backing brings memory up to date by itself after that."""
        ...

    def catch_up(self) -> None:
        """Before memory is read: have it hold what is kept, where a write has failed since."""
        ...

    def changing(self, trial_ids: Sequence[str] = ()) -> AbstractContextManager[object]:
        """Return what a thread holds while it decides and writes a change of these trials; none: of what else there is.

        Memory holds what is kept when it begins.
        """
        ...

    def noting(self) -> AbstractContextManager[object]:
        """Return what a thread holds while it writes what could be measured or told again."""
        ...

    def name_of(self, spec: TrialSpec) -> str:
        """Return the id of a trial that is to be made."""
        ...

    def save_study(self, study: Study) -> Study: ...

    def save_lease(self, study: Study) -> None: ...

    def add_trial(self, record: TrialRecord) -> TrialRecord: ...

    def save_trials(self, records: Sequence[TrialRecord]) -> Sequence[TrialRecord]: ...

    def add_replica(self, replica: ReplicaRecord) -> None: ...

    def save_replicas(self, replicas: Sequence[ReplicaRecord], fields: Sequence[str]) -> None:
        """Keep these fields of them."""
        ...

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


class TrialStore(Protocol):
    def put_study(self, study: Study) -> None: ...

    def set_terms(self, name: str, terms: StudyTerms) -> None: ...

    def touch_study(self, name: str, owner: str, now: float) -> bool:
        """Renew the lease of a study's driver; False when it is not the driver (any more)."""
        ...

    def disown_study(self, name: str, owner: str) -> None:
        """The driver lets go of its study; nothing happens when it is not the driver."""
        ...

    def studies(self) -> list[Study]: ...

    def submit(self, spec: TrialSpec, now: float) -> TrialRecord:
        """Add a trial; the same (study, number) again returns what is there."""
        ...

    def trials(self, *, live_only: bool = False) -> list[TrialRecord]:
        """Return the trials in order of submission."""
        ...

    def trial(self, trial_id: str) -> TrialRecord:
        """Raises UnknownTrial."""
        ...

    def save_trial(self, record: TrialRecord) -> None:
        """Write what the control loop decides; the facts below have calls of their own and are left alone."""
        ...

    def set_outcome(self, trial_id: str, outcome: Outcome) -> bool:
        """Keep the first outcome; False when there was one already."""
        ...

    def note_entered(self, trial_id: str, generation: int) -> None:
        """A generation's rank 0 has entered it; lower numbers than the stored one change nothing."""
        ...

    def note_abandoned(self, trial_id: str, generation: int) -> None: ...

    def request_cancel(self, trial_id: str, why: str) -> None: ...

    def put_parameters(self, trial_id: str, parameters: Mapping[str, Any]) -> None:
        """Add parameters that the tuner tries with the trial; later values of a name win."""
        ...

    def hold(self, trial_ids: Sequence[str], why: str) -> None:
        """Keep trials from holding slots until they are released; those that are over stay as they are."""
        ...

    def release(self, trial_ids: Sequence[str]) -> None:
        """Somebody waits for these trials: they may hold slots."""
        ...

    def add_replica(self, replica: ReplicaRecord) -> None: ...

    def replicas(self, *, trial_id: str | None = None, live_only: bool = True) -> list[ReplicaRecord]: ...

    def update_replica(self, replica_id: str, **fields: Any) -> None:
        """Update a replica's facts; what is gone stays gone, whatever arrives later."""
        ...

    def retry_join(self, replica_id: str, aimed: int | None) -> None:
        """Have a joiner aim again that had aimed at this epoch; one that aims elsewhere by now is left alone."""
        ...

    def set_replica_state(self, replica_ids: Sequence[str], state: ReplicaState) -> None: ...

    def put_hints(self, trial_id: str, hints: Mapping[str, Any], measured: Measurement | None = None) -> None:
        """The latest hints win; ``measured`` is kept beside those of before."""
        ...

    def measurements(self, trial_id: str) -> list[Measurement]:
        """Return the measurements in order of time; on a cluster those since its scheduler began."""
        ...

    def hints(self, trial_ids: Sequence[str]) -> dict[str, dict[str, Any]]: ...

    def add_report(self, report: Report) -> None:
        """A step that was reported before keeps its first value."""
        ...

    def reports(self, study: str) -> list[Report]: ...

    def trial_reports(self, trial_id: str) -> list[Report]:
        """Return one trial's reports in order of steps."""
        ...

    def latest_reports(self, study: str) -> dict[str, Report]: ...

    def has_reported(self, trial_id: str) -> bool: ...

    def add_history(self, entry: HistoryEntry) -> None: ...

    def history(self, trial_id: str) -> list[HistoryEntry]: ...

    def recent_history(self, *, limit: int, until: float | None = None, study: str | None = None) -> list[HistoryEntry]:
        """The latest ``limit`` entries of all trials, or of one study's, not younger than ``until``; the newest first.

        Those of one moment come in one order however often they are asked for.
        """
        ...

    def resizes(self) -> list[HistoryEntry]:
        """Return changes of the number of replicas, of all trials, oldest first."""
        ...

    def slot_intervals(self) -> list[SlotInterval]: ...
