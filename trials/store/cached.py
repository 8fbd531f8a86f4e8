"""A SQL store whose present state is in memory as well: reads cost microseconds, writes are durable first.

For the one process that owns the database (its folder's or server's lock says so): nobody else changes what this has
read. A write goes to the database, and to memory when that has taken it; after one that failed, what is in memory is
read anew, because a failed write may have got through. Histories and what ended long ago are left in the database.

Concurrency: any thread may call; writes are made one at a time, in one order for both.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from trials.record import Measurement, Outcome, ReplicaRecord, ReplicaState, Report, Study, TrialRecord
from trials.spec import TrialSpec
from trials.store.base import HistoryEntry, SlotInterval
from trials.store.memory import InMemoryTrialStore
from trials.store.sql import SqlTrialStore
from trials.terms import StudyTerms


class CachedTrialStore:
    def __init__(self, sql: SqlTrialStore) -> None:
        self._sql = sql
        self._lock = threading.RLock()
        self._memory = InMemoryTrialStore()
        self._stale = True
        self._refresh()

    def close(self) -> None:
        self._sql.close()

    def _refresh(self) -> None:
        if not self._stale:
            return
        memory = InMemoryTrialStore()
        for study in self._sql.studies():
            memory.put_study(study)
            for report in self._sql.reports(study.name):
                memory.put_report(study.name, report)
        for trial in self._sql.trials():
            memory.adopt(trial)
        for replica in self._sql.replicas():
            memory.add_replica(replica)
        live = [trial.trial_id for trial in memory.trials(live_only=True)]
        for trial_id, hints in self._sql.hints(live).items():
            memory.put_hints(trial_id, hints)
        for entry in self._sql.resizes():
            memory.add_history(entry)
        self._memory = memory
        self._stale = False

    @contextmanager
    def _writing(self) -> Iterator[InMemoryTrialStore]:
        with self._lock:
            self._refresh()
            try:
                yield self._memory
            except BaseException:
                self._stale = True
                raise

    def _reading(self) -> InMemoryTrialStore:
        if self._stale:
            with self._lock:
                self._refresh()
        return self._memory

    # ------------------------------------------------------------------ studies

    def put_study(self, study: Study) -> None:
        with self._writing() as memory:
            self._sql.put_study(study)
            memory.put_study(study)

    def set_terms(self, name: str, terms: StudyTerms) -> None:
        with self._writing() as memory:
            self._sql.set_terms(name, terms)
            memory.set_terms(name, terms)

    def touch_study(self, name: str, owner: str, now: float) -> bool:
        with self._writing() as memory:
            return self._sql.touch_study(name, owner, now) and memory.touch_study(name, owner, now)

    def disown_study(self, name: str, owner: str) -> None:
        with self._writing() as memory:
            self._sql.disown_study(name, owner)
            memory.disown_study(name, owner)

    def studies(self) -> list[Study]:
        return self._reading().studies()

    # ------------------------------------------------------------------ trials

    def submit(self, spec: TrialSpec, now: float) -> TrialRecord:
        with self._writing() as memory:
            record = self._sql.submit(spec, now)
            if not memory.has_trial(record.trial_id):
                memory.adopt(record)
            return memory.trial(record.trial_id)

    def trials(self, *, live_only: bool = False) -> list[TrialRecord]:
        return self._reading().trials(live_only=live_only)

    def trial(self, trial_id: str) -> TrialRecord:
        return self._reading().trial(trial_id)

    def save_trial(self, record: TrialRecord) -> None:
        with self._writing() as memory:
            self._sql.save_trial(record)
            memory.save_trial(record)
            if record.state.is_final:
                memory.forget_hints(record.trial_id)

    def set_outcome(self, trial_id: str, outcome: Outcome) -> bool:
        with self._writing() as memory:
            return self._sql.set_outcome(trial_id, outcome) and memory.set_outcome(trial_id, outcome)

    def note_entered(self, trial_id: str, generation: int) -> None:
        with self._writing() as memory:
            self._sql.note_entered(trial_id, generation)
            memory.note_entered(trial_id, generation)

    def note_abandoned(self, trial_id: str, generation: int) -> None:
        with self._writing() as memory:
            self._sql.note_abandoned(trial_id, generation)
            memory.note_abandoned(trial_id, generation)

    def request_cancel(self, trial_id: str, why: str) -> None:
        with self._writing() as memory:
            self._sql.request_cancel(trial_id, why)
            memory.request_cancel(trial_id, why)

    def put_parameters(self, trial_id: str, parameters: Mapping[str, Any]) -> None:
        with self._writing() as memory:
            self._sql.put_parameters(trial_id, parameters)
            memory.put_parameters(trial_id, parameters)

    def hold(self, trial_ids: Sequence[str], why: str) -> None:
        with self._writing() as memory:
            self._sql.hold(trial_ids, why)
            memory.hold(trial_ids, why)

    def release(self, trial_ids: Sequence[str]) -> None:
        with self._writing() as memory:
            if any(memory.has_trial(name) and memory.trial(name).hold is not None for name in trial_ids):
                self._sql.release(trial_ids)
                memory.release(trial_ids)

    def forget_trials(self, trial_ids: Sequence[str]) -> None:
        """With all that is kept of them."""
        with self._writing() as memory:
            self._sql.forget_trials(trial_ids)
            for trial_id in trial_ids:
                memory.forget_trial(trial_id)

    def forget_study(self, name: str) -> None:
        with self._writing() as memory:
            self._sql.forget_study(name)
            memory.forget_study(name)

    # ------------------------------------------------------------------ replicas

    def add_replica(self, replica: ReplicaRecord) -> None:
        with self._writing() as memory:
            self._sql.add_replica(replica)
            memory.add_replica(replica)

    def replicas(self, *, trial_id: str | None = None, live_only: bool = True) -> list[ReplicaRecord]:
        if live_only:
            return self._reading().replicas(trial_id=trial_id)
        return self._sql.replicas(trial_id=trial_id, live_only=False)

    def update_replica(self, replica_id: str, **fields: Any) -> None:
        with self._writing() as memory:
            self._sql.update_replica(replica_id, **fields)
            memory.update_replica(replica_id, **fields)
            if fields.get("state") is ReplicaState.GONE:
                memory.forget_replica(replica_id)

    def retry_join(self, replica_id: str, aimed: int | None) -> None:
        with self._writing() as memory:
            self._sql.retry_join(replica_id, aimed)
            memory.retry_join(replica_id, aimed)

    def set_replica_state(self, replica_ids: Sequence[str], state: ReplicaState) -> None:
        with self._writing() as memory:
            self._sql.set_replica_state(replica_ids, state)
            memory.set_replica_state(replica_ids, state)

    # ------------------------------------------------------------------ hints, reports, history

    def put_hints(self, trial_id: str, hints: Mapping[str, Any], measured: Measurement | None = None) -> None:
        with self._writing() as memory:
            self._sql.put_hints(trial_id, hints, measured)
            if not memory.has_trial(trial_id) or not memory.trial(trial_id).state.is_final:
                memory.put_hints(trial_id, hints)

    def hints(self, trial_ids: Sequence[str]) -> dict[str, dict[str, Any]]:
        memory = self._reading()
        ended = [name for name in trial_ids if memory.has_trial(name) and memory.trial(name).state.is_final]
        return memory.hints(trial_ids) | (self._sql.hints(ended) if ended else {})

    def measurements(self, trial_id: str) -> list[Measurement]:
        return self._sql.measurements(trial_id)

    def add_report(self, report: Report) -> None:
        with self._writing() as memory:
            self._sql.add_report(report)
            memory.add_report(report)

    def reports(self, study: str) -> list[Report]:
        return self._reading().reports(study)

    def trial_reports(self, trial_id: str) -> list[Report]:
        return self._reading().trial_reports(trial_id)

    def latest_reports(self, study: str) -> dict[str, Report]:
        return self._reading().latest_reports(study)

    def has_reported(self, trial_id: str) -> bool:
        return self._reading().has_reported(trial_id)

    def add_history(self, entry: HistoryEntry) -> None:
        if not entry.resizes:
            self._sql.add_history(entry)
            return
        with self._writing() as memory:
            self._sql.add_history(entry)
            memory.add_history(entry)

    def history(self, trial_id: str) -> list[HistoryEntry]:
        return self._sql.history(trial_id)

    def recent_history(self, *, limit: int, until: float | None = None, study: str | None = None) -> list[HistoryEntry]:
        return self._sql.recent_history(limit=limit, until=until, study=study)

    def resizes(self) -> list[HistoryEntry]:
        return self._reading().resizes()

    def slot_intervals(self) -> list[SlotInterval]:
        return self._sql.slot_intervals()
