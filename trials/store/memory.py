"""A store in memory: for the simulator, whose trials end with it, and wherever nothing has to outlive the process."""

from __future__ import annotations

import heapq
import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from trials.errors import UnknownTrial
from trials.record import Measurement, Outcome, Reason, ReplicaRecord, ReplicaState, Report, Study, TrialRecord
from trials.spec import TrialSpec
from trials.store.base import AIM_AGAIN, HistoryEntry, SlotInterval
from trials.store.report_book import ReportBook
from trials.terms import StudyTerms


class InMemoryTrialStore:
    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._studies: dict[str, Study] = {}
        self._trials: dict[str, TrialRecord] = {}
        self._live: dict[str, None] = {}
        self._by_number: dict[tuple[str, int], str] = {}
        self._replicas: dict[str, ReplicaRecord] = {}
        self._live_replicas: dict[str, None] = {}
        self._replicas_of: dict[str, dict[str, None]] = {}
        self._hints: dict[str, dict[str, Any]] = {}
        self._reports: dict[str, ReportBook] = {}
        self._history: dict[str, list[HistoryEntry]] = {}
        self._measured: dict[str, list[Measurement]] = {}
        self.writes = 0
        """Counts changes: a reader that sees the same number twice has missed nothing."""

    # ------------------------------------------------------------------ studies

    def put_study(self, study: Study) -> None:
        with self._lock:
            self.writes += 1
            self._studies[study.name] = study

    def set_terms(self, name: str, terms: StudyTerms) -> None:
        with self._lock:
            self.writes += 1
            if name in self._studies:
                self._studies[name] = replace(self._studies[name], terms=terms)

    def touch_study(self, name: str, owner: str, now: float) -> bool:
        with self._lock:
            study = self._studies.get(name)
            if study is None or study.owner != owner:
                return False
            self._studies[name] = replace(study, owner_seen_at=now)
            return True

    def disown_study(self, name: str, owner: str) -> None:
        with self._lock:
            study = self._studies.get(name)
            if study is not None and study.owner == owner:
                self.put_study(replace(study, owner=None))

    def forget_study(self, name: str) -> None:
        with self._lock:
            self.writes += 1
            self._studies.pop(name, None)

    def studies(self) -> list[Study]:
        with self._lock:
            return list(self._studies.values())

    # ------------------------------------------------------------------ trials

    def submit(self, spec: TrialSpec, now: float) -> TrialRecord:
        with self._lock:
            known = self._by_number.get((spec.study, spec.number))
            if known is not None:
                return self._trials[known]
            self.writes += 1
            trial_id = f"t{len(self._trials):010d}"
            reason = Reason(code="submitted", sentence="waits for the next look at the cluster")
            record = TrialRecord(trial_id=trial_id, spec=spec, reason=reason, submitted_at=now)
            self._by_number[spec.study, spec.number] = trial_id
            self._trials[trial_id] = record
            self._live[trial_id] = None
            return record

    def adopt(self, record: TrialRecord) -> None:
        """Take over a trial as it is in another store, or has become there."""
        with self._lock:
            self.writes += 1
            self._by_number[record.spec.study, record.spec.number] = record.trial_id
            self._trials[record.trial_id] = record
            if record.state.is_final:
                self._live.pop(record.trial_id, None)
            else:
                self._live[record.trial_id] = None

    def reload(
        self,
        record: TrialRecord,
        replicas: Sequence[ReplicaRecord],
        reports: Sequence[Report],
        history: Sequence[HistoryEntry],
        hints: Mapping[str, Any] | None,
        measured: Sequence[Measurement] = (),
    ) -> None:
        """Replace all that is known of a trial, in one go and without changing its place."""
        trial_id = record.trial_id
        with self._lock:
            for replica_id in list(self._replicas_of.get(trial_id, ())):
                self.forget_replica(replica_id)
            self._book(record.spec.study).forget_trial(trial_id)
            self.adopt(record)
            for replica in replicas:
                self.add_replica(replica)
                if replica.state is ReplicaState.GONE:
                    self._live_replicas.pop(replica.replica_id, None)
            for report in reports:
                self.put_report(record.spec.study, report)
            self._history[trial_id] = list(history)
            self._measured[trial_id] = list(measured)
            if hints is not None:
                self._hints[trial_id] = dict(hints)

    def steps_of(self, study: str, trial_id: str) -> list[int]:
        """At which the trial has reported."""
        with self._lock:
            return self._book(study).steps_of(trial_id)

    def has_reported(self, trial_id: str) -> bool:
        with self._lock:
            return self._book(self.trial(trial_id).spec.study).has_any(trial_id)

    def has_report(self, study: str, trial_id: str, step: int) -> bool:
        with self._lock:
            return self._book(study).has(trial_id, step)

    def forget_trial(self, trial_id: str) -> None:
        """It does not exist any more."""
        with self._lock:
            record = self._trials.pop(trial_id, None)
            if record is None:
                return
            self.writes += 1
            self._live.pop(trial_id, None)
            self._by_number.pop((record.spec.study, record.spec.number), None)
            for replica_id in list(self._replicas_of.get(trial_id, ())):
                self.forget_replica(replica_id)
            self._hints.pop(trial_id, None)
            self._history.pop(trial_id, None)
            self._measured.pop(trial_id, None)
            self._book(record.spec.study).forget_trial(trial_id)

    def has_trial(self, trial_id: str) -> bool:
        return trial_id in self._trials

    def trials(self, *, live_only: bool = False) -> list[TrialRecord]:
        with self._lock:
            return [self._trials[name] for name in self._live] if live_only else list(self._trials.values())

    def trial(self, trial_id: str) -> TrialRecord:
        with self._lock:
            try:
                return self._trials[trial_id]
            except KeyError:
                raise UnknownTrial(f"no trial is called {trial_id!r}; `elastune ls` lists them") from None

    def save_trial(self, record: TrialRecord) -> None:
        with self._lock:
            self._put(record.with_facts_of(self.trial(record.trial_id)))

    def _put(self, record: TrialRecord) -> None:
        self.writes += 1
        self._trials[record.trial_id] = record
        if record.state.is_final:
            self._live.pop(record.trial_id, None)

    def set_outcome(self, trial_id: str, outcome: Outcome) -> bool:
        with self._lock:
            record = self.trial(trial_id)
            if record.outcome is not None:
                return False
            self._put(replace(record, outcome=outcome))
            return True

    def note_entered(self, trial_id: str, generation: int) -> None:
        with self._lock:
            record = self.trial(trial_id)
            if generation > record.entered:
                self._put(replace(record, entered=generation))

    def note_abandoned(self, trial_id: str, generation: int) -> None:
        with self._lock:
            record = self.trial(trial_id)
            if generation > record.abandoned:
                self._put(replace(record, abandoned=generation))

    def request_cancel(self, trial_id: str, why: str) -> None:
        with self._lock:
            self._put(replace(self.trial(trial_id), cancel_requested=why))

    def put_parameters(self, trial_id: str, parameters: Mapping[str, Any]) -> None:
        with self._lock:
            record = self.trial(trial_id)
            self._put(replace(record, parameters={**record.parameters, **parameters}))

    def hold(self, trial_ids: Sequence[str], why: str) -> None:
        with self._lock:
            for trial_id in trial_ids:
                record = self._trials.get(trial_id)
                if record is not None and not record.state.is_final:
                    self._put(replace(record, hold=why))

    def release(self, trial_ids: Sequence[str]) -> None:
        with self._lock:
            for trial_id in trial_ids:
                record = self._trials.get(trial_id)
                if record is not None and record.hold is not None:
                    self._put(replace(record, hold=None))

    # ------------------------------------------------------------------ replicas

    def add_replica(self, replica: ReplicaRecord) -> None:
        with self._lock:
            self.writes += 1
            self._replicas[replica.replica_id] = replica
            self._live_replicas[replica.replica_id] = None
            self._replicas_of.setdefault(replica.trial_id, {})[replica.replica_id] = None

    def replicas(self, *, trial_id: str | None = None, live_only: bool = True) -> list[ReplicaRecord]:
        with self._lock:
            if trial_id is not None:
                names = self._replicas_of.get(trial_id, {})
            else:
                names = self._live_replicas if live_only else dict.fromkeys(self._replicas)
            found = [self._replicas[name] for name in names]
        if live_only:
            found = [row for row in found if row.state is not ReplicaState.GONE]
        return sorted(found, key=lambda row: (row.launched_at, row.launch_index))

    def forget_replica(self, replica_id: str) -> None:
        with self._lock:
            row = self._replicas.pop(replica_id, None)
            self._live_replicas.pop(replica_id, None)
            if row is not None:
                self._replicas_of[row.trial_id].pop(replica_id, None)
                if not self._replicas_of[row.trial_id]:
                    del self._replicas_of[row.trial_id]

    def update_replica(self, replica_id: str, **fields: Any) -> None:
        with self._lock:
            row = self._replicas.get(replica_id)
            if row is None or (row.state is ReplicaState.GONE and fields.get("state") is not ReplicaState.GONE):
                return
            self.writes += 1
            self._replicas[replica_id] = replace(row, **fields)
            if fields.get("state") is ReplicaState.GONE:
                self._live_replicas.pop(replica_id, None)

    def retry_join(self, replica_id: str, aimed: int | None) -> None:
        with self._lock:
            if self.aims_at(replica_id, aimed):
                self.update_replica(replica_id, **AIM_AGAIN)

    def aims_at(self, replica_id: str, epoch: int | None) -> bool:
        row = self._replicas.get(replica_id)
        return row is not None and row.join_epoch == epoch

    def replica_state(self, replica_id: str) -> ReplicaState | None:
        with self._lock:
            row = self._replicas.get(replica_id)
            return None if row is None else row.state

    def trial_of(self, replica_id: str) -> str | None:
        """The trial that a replica belongs to."""
        with self._lock:
            row = self._replicas.get(replica_id)
            return None if row is None else row.trial_id

    def set_replica_state(self, replica_ids: Sequence[str], state: ReplicaState) -> None:
        with self._lock:
            for replica_id in replica_ids:
                self.update_replica(replica_id, state=state)

    # ------------------------------------------------------------------ hints, reports, history

    def put_hints(self, trial_id: str, hints: Mapping[str, Any], measured: Measurement | None = None) -> None:
        with self._lock:
            self._hints[trial_id] = dict(hints)
            if measured is not None:
                self._measured.setdefault(trial_id, []).append(measured)

    def forget_measurements(self, trial_id: str, gone: Sequence[Measurement]) -> None:
        moments = {each.at for each in gone}
        with self._lock:
            self._measured[trial_id] = [each for each in self._measured[trial_id] if each.at not in moments]

    def measurements(self, trial_id: str) -> list[Measurement]:
        with self._lock:
            return list(self._measured.get(trial_id, ()))

    def forget_reports(self, study: str, trial_id: str, steps: Sequence[int]) -> None:
        with self._lock:
            self._book(study).forget(trial_id, steps)

    def forget_hints(self, trial_id: str) -> None:
        with self._lock:
            self._hints.pop(trial_id, None)

    def hints(self, trial_ids: Sequence[str]) -> dict[str, dict[str, Any]]:
        with self._lock:
            return {trial_id: self._hints[trial_id] for trial_id in trial_ids if trial_id in self._hints}

    def add_report(self, report: Report) -> None:
        with self._lock:
            self.put_report(self.trial(report.trial_id).spec.study, report)

    def put_report(self, study: str, report: Report) -> None:
        with self._lock:
            self._book(study).add(report)

    def reports(self, study: str) -> list[Report]:
        with self._lock:
            return self._book(study).rows()

    def trial_reports(self, trial_id: str) -> list[Report]:
        with self._lock:
            return list(self._book(self.trial(trial_id).spec.study).of(trial_id))

    def latest_reports(self, study: str) -> dict[str, Report]:
        with self._lock:
            return self._book(study).latest()

    def _book(self, study: str) -> ReportBook:
        return self._reports.setdefault(study, ReportBook())

    def add_history(self, entry: HistoryEntry) -> None:
        with self._lock:
            self._history.setdefault(entry.trial_id, []).append(entry)

    def history(self, trial_id: str) -> list[HistoryEntry]:
        with self._lock:
            return list(self._history.get(trial_id, ()))

    def recent_history(self, *, limit: int, until: float | None = None, study: str | None = None) -> list[HistoryEntry]:
        with self._lock:
            entries = [
                (entry.at, place, entry)
                for trial_id, entries in self._history.items()
                if study is None or (trial_id in self._trials and self._trials[trial_id].spec.study == study)
                for place, entry in enumerate(entries)
                if until is None or entry.at <= until
            ]
        return [entry for _, _, entry in heapq.nlargest(limit, entries, key=lambda each: each[:2])]

    def resizes(self) -> list[HistoryEntry]:
        with self._lock:
            entries = [entry for entries in self._history.values() for entry in entries if entry.resizes]
        return sorted(entries, key=lambda entry: entry.at)

    def slot_intervals(self) -> list[SlotInterval]:
        rows = self.replicas(live_only=False)
        return [SlotInterval.of(row) for row in rows]

    def close(self) -> None:
        """Nothing is kept."""
