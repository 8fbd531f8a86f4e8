"""The present state of all trials, and the rules by which it changes. The truth is here; a backing keeps it.

Every change is decided here, written to the backing, and only then seen by readers. After a write that failed, what is
kept is read again, because the write may have got through. Where the backing has an archive, histories, measurements
and what ended long ago are read from there; else they stay in memory.

For the one process that owns the backing (its folder's or server's lock says so). Any thread may call: the backing says
which changes exclude each other, and reading waits for none that is being written.
"""

from __future__ import annotations

import heapq
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

from trials.errors import UnknownTrial
from trials.record import Measurement, Outcome, Reason, ReplicaRecord, ReplicaState, Report, Study, TrialRecord
from trials.spec import TrialSpec
from trials.store.base import AIM_AGAIN, Backing, HistoryEntry, SlotInterval, StoreContent
from trials.terms import StudyTerms

DECIDED = frozenset({"state", "join_epoch", "retry_join"})
"""Fields of a replica that a successor could not find out again."""


class TrialStore:
    """Every write is durable when the call returns, or raises StoreUnavailable."""

    def __init__(self, backing: Backing | None = None) -> None:
        self._backing = backing or Backing()
        self._archive = self._backing.archive
        self._lock = threading.RLock()
        self.writes = 0
        """Counts changes: a reader that sees the same number twice has missed nothing."""
        self._clear()
        self._backing.load(self)

    def _clear(self) -> None:
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

    def close(self) -> None:
        self._backing.close()

    def replace_all(self, kept: StoreContent) -> None:
        """Hold what a backing has kept, and nothing else."""
        with self._lock:
            self._clear()
            self.writes += 1
            for study in kept.studies:
                self._studies[study.name] = study
            for trial in kept.trials:
                self._insert(trial)
            for name, reports in kept.reports.items():
                for report in reports:
                    self._book(name).add(report)
            for replica in kept.live_replicas:
                self._insert_replica(replica)
            self._hints.update(kept.hints)
            for entry in kept.resizes:
                self._history.setdefault(entry.trial_id, []).append(entry)

    def _read(self) -> AbstractContextManager[Any]:
        """Return the lock to read under, once all that is known elsewhere is here."""
        self._backing.catch_up()
        return self._lock

    # ------------------------------------------------------------------ studies

    def put_study(self, study: Study) -> None:
        with self._backing.changing():
            self.adopt_study(self._backing.save_study(study))

    def adopt_study(self, study: Study) -> None:
        """Take over a study as its backing has it."""
        with self._lock:
            self.writes += 1
            self._studies[study.name] = study

    def set_terms(self, name: str, terms: StudyTerms) -> None:
        with self._backing.changing():
            if name in self._studies:
                self.put_study(replace(self._studies[name], terms=terms))

    def touch_study(self, name: str, owner: str, now: float) -> bool:
        """Renew the lease of a study's driver; False when it is not the driver (any more)."""
        with self._backing.noting():
            study = self._studies.get(name)
            if study is None or study.owner != owner:
                return False
            touched = replace(study, owner_seen_at=now)
            self._backing.save_lease(touched)
            # No change that anybody acts on.
            self._studies[name] = touched
            return True

    def disown_study(self, name: str, owner: str) -> None:
        """Let the driver go of its study; do nothing when it is not the driver."""
        with self._backing.changing():
            study = self._studies.get(name)
            if study is not None and study.owner == owner:
                self.put_study(replace(study, owner=None))

    def forget_study(self, name: str) -> None:
        with self._backing.changing():
            self._backing.forget_study(name)
            with self._lock:
                self.writes += 1
                self._studies.pop(name, None)

    def studies(self) -> list[Study]:
        with self._read():
            return list(self._studies.values())

    # ------------------------------------------------------------------ trials

    def submit(self, spec: TrialSpec, now: float) -> TrialRecord:
        """Add a trial; the same (study, number) again returns what is there."""
        with self._backing.changing():
            known = self._by_number.get((spec.study, spec.number))
            if known is not None:
                return self._trials[known]
            reason = Reason(code="submitted", sentence="waits for the scheduler's next decision")
            trial_id = self._backing.name_of(spec)
            record = TrialRecord(trial_id=trial_id, spec=spec, reason=reason, submitted_at=now)
            record = self._backing.add_trial(record)
            self.adopt(record)
            return record

    def adopt(self, record: TrialRecord) -> None:
        """Add a trial that was read from the backing, or replace it, without writing it back."""
        with self._lock:
            self.writes += 1
            self._insert(record)

    def _insert(self, record: TrialRecord) -> None:
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
                self._forget_replica(replica_id)
            self._book(record.spec.study).forget_trial(trial_id)
            self.adopt(record)
            for replica in replicas:
                self._insert_replica(replica)
                if replica.state is ReplicaState.GONE:
                    self._live_replicas.pop(replica.replica_id, None)
            for report in reports:
                self._book(record.spec.study).add(report)
            self._history[trial_id] = list(history)
            self._measured[trial_id] = list(measured)
            if hints is not None:
                self._hints[trial_id] = dict(hints)

    def has_reported(self, trial_id: str) -> bool:
        with self._read():
            return self._book(self.trial(trial_id).spec.study).has_any(trial_id)

    def forget_trials(self, trial_ids: Sequence[str]) -> None:
        """Forget these trials, with all that is kept of them."""
        with self._backing.changing(trial_ids):
            self._backing.forget_trials(trial_ids)
            for trial_id in trial_ids:
                self.forget_trial(trial_id)

    def forget_trial(self, trial_id: str) -> None:
        """Drop a trial from memory, with its reports, replicas and hints; the backing is not touched."""
        with self._lock:
            record = self._trials.pop(trial_id, None)
            if record is None:
                return
            self.writes += 1
            self._live.pop(trial_id, None)
            self.free_number(record)
            for replica_id in list(self._replicas_of.get(trial_id, ())):
                self._forget_replica(replica_id)
            self._hints.pop(trial_id, None)
            self._history.pop(trial_id, None)
            self._measured.pop(trial_id, None)
            self._book(record.spec.study).forget_trial(trial_id)

    def free_number(self, record: TrialRecord) -> None:
        """Let another trial have the number of this one from now on."""
        with self._lock:
            if self._by_number.get((record.spec.study, record.spec.number)) == record.trial_id:
                del self._by_number[record.spec.study, record.spec.number]

    def has_trial(self, trial_id: str) -> bool:
        return trial_id in self._trials

    def trials(self, *, live_only: bool = False) -> list[TrialRecord]:
        """Return the trials in order of submission."""
        with self._read():
            return [self._trials[name] for name in self._live] if live_only else list(self._trials.values())

    def trial(self, trial_id: str) -> TrialRecord:
        """Return the trial's record; raise UnknownTrial."""
        with self._read():
            try:
                return self._trials[trial_id]
            except KeyError:
                raise UnknownTrial(f"no trial is called {trial_id!r}; `elastune ls` lists them") from None

    def save_trial(self, record: TrialRecord) -> None:
        """Write what the control loop decides; the facts below have calls of their own and are left alone."""
        self._change([record.trial_id], record.with_facts_of)

    def set_outcome(self, trial_id: str, outcome: Outcome) -> bool:
        """Keep the first outcome; False when there was one already."""
        return self._change([trial_id], lambda trial: None if trial.outcome else replace(trial, outcome=outcome))

    def note_entered(self, trial_id: str, generation: int) -> None:
        """Note that a generation's rank 0 has entered it; lower numbers than the stored one change nothing."""
        self._change(
            [trial_id], lambda trial: replace(trial, entered=generation) if generation > trial.entered else None
        )

    def note_abandoned(self, trial_id: str, generation: int) -> None:
        self._change(
            [trial_id], lambda trial: replace(trial, abandoned=generation) if generation > trial.abandoned else None
        )

    def request_cancel(self, trial_id: str, why: str) -> None:
        self._change([trial_id], lambda trial: replace(trial, cancel_requested=why))

    def put_parameters(self, trial_id: str, parameters: Mapping[str, Any]) -> None:
        """Add parameters that the tuner tries with the trial; later values of a name win."""
        self._change([trial_id], lambda trial: replace(trial, parameters={**trial.parameters, **parameters}))

    def hold(self, trial_ids: Sequence[str], why: str) -> None:
        """Keep trials from holding slots until they are released; those that are over stay as they are."""
        self._change(
            [name for name in trial_ids if self.has_trial(name)],
            lambda trial: None if trial.state.is_final or trial.hold == why else replace(trial, hold=why),
        )

    def release(self, trial_ids: Sequence[str]) -> None:
        """Lift the hold on these trials (see ``hold``), so that they can be given slots again."""
        self._change(
            [name for name in trial_ids if self.has_trial(name)],
            lambda trial: None if trial.hold is None else replace(trial, hold=None),
        )

    def _change(self, trial_ids: Sequence[str], rule: Callable[[TrialRecord], TrialRecord | None]) -> bool:
        """Keep what a rule makes of each trial, unless it leaves it alone; return whether it changed one."""
        with self._backing.changing(trial_ids):
            changed = [record for record in map(rule, map(self.trial, trial_ids)) if record is not None]
            if not changed:
                return False
            kept = self._backing.save_trials(changed)
            with self._lock:
                self.writes += 1
                for record in kept:
                    self._trials[record.trial_id] = record
                    if record.state.is_final:
                        self._live.pop(record.trial_id, None)
                        if self._archive is not None:
                            self._hints.pop(record.trial_id, None)
            return True

    # ------------------------------------------------------------------ replicas

    def add_replica(self, replica: ReplicaRecord) -> None:
        with self._backing.changing([replica.trial_id]):
            self._backing.add_replica(replica)
            with self._lock:
                self.writes += 1
                self._insert_replica(replica)

    def _insert_replica(self, replica: ReplicaRecord) -> None:
        self._replicas[replica.replica_id] = replica
        self._live_replicas[replica.replica_id] = None
        self._replicas_of.setdefault(replica.trial_id, {})[replica.replica_id] = None

    def replicas(self, *, trial_id: str | None = None, live_only: bool = True) -> list[ReplicaRecord]:
        if self._archive is not None and not live_only:
            return self._archive.replicas(trial_id=trial_id, live_only=False)
        with self._read():
            if trial_id is not None:
                names = self._replicas_of.get(trial_id, {})
            else:
                names = self._live_replicas if live_only else dict.fromkeys(self._replicas)
            found = [self._replicas[name] for name in names]
        if live_only:
            found = [row for row in found if row.state is not ReplicaState.GONE]
        return sorted(found, key=lambda row: (row.launched_at, row.launch_index))

    def _forget_replica(self, replica_id: str) -> None:
        with self._lock:
            row = self._replicas.pop(replica_id, None)
            self._live_replicas.pop(replica_id, None)
            if row is not None:
                self._replicas_of[row.trial_id].pop(replica_id, None)
                if not self._replicas_of[row.trial_id]:
                    del self._replicas_of[row.trial_id]

    def update_replica(self, replica_id: str, **fields: Any) -> None:
        """Update a replica's facts; what is gone stays gone, whatever arrives later."""
        self._update_replicas([replica_id], fields)

    def set_replica_state(self, replica_ids: Sequence[str], state: ReplicaState) -> None:
        self._update_replicas(replica_ids, {"state": state})

    def retry_join(self, replica_id: str, aimed: int | None) -> None:
        """Let a joiner choose its entry epoch again, if ``aimed`` is still the one it has chosen."""
        self._update_replicas([replica_id], AIM_AGAIN, where=lambda row: row.join_epoch == aimed)

    def _update_replicas(
        self,
        replica_ids: Sequence[str],
        fields: Mapping[str, Any],
        where: Callable[[ReplicaRecord], bool] = lambda row: True,
    ) -> None:
        ends = fields.get("state") is ReplicaState.GONE
        trial_ids = {self._replicas[name].trial_id for name in replica_ids if name in self._replicas}
        with self._backing.changing(sorted(trial_ids)) if fields.keys() & DECIDED else self._backing.noting():
            known = [self._replicas[name] for name in replica_ids if name in self._replicas]
            meant = [row for row in known if where(row) and (ends or row.state is not ReplicaState.GONE)]
            if not meant:
                return
            self._backing.save_replicas([replace(row, **fields) for row in meant], tuple(fields))
            with self._lock:
                self.writes += 1
                for replica_id in (row.replica_id for row in meant):
                    # What was only noted may have come meanwhile.
                    self._replicas[replica_id] = replace(self._replicas[replica_id], **fields)
                    if ends:
                        self._live_replicas.pop(replica_id, None)
                    if ends and self._archive is not None:
                        self._forget_replica(replica_id)

    # ------------------------------------------------------------------ hints, reports, history

    def put_hints(self, trial_id: str, hints: Mapping[str, Any], measured: Measurement | None = None) -> None:
        """Put the latest hints in place of earlier ones; ``measured`` is kept beside those of before."""
        with self._backing.noting():
            self._backing.save_hints(trial_id, hints, measured)
            with self._lock:
                known = self._trials.get(trial_id)
                if self._archive is None or known is None or not known.state.is_final:
                    self._hints[trial_id] = dict(hints)
                if self._archive is None and measured is not None:
                    self._measured.setdefault(trial_id, []).append(measured)

    def measurements(self, trial_id: str) -> list[Measurement]:
        """Return the measurements in order of time; on a cluster those since its scheduler began."""
        if self._archive is not None:
            return self._archive.measurements(trial_id)
        with self._lock:
            return list(self._measured.get(trial_id, ()))

    def hints(self, trial_ids: Sequence[str]) -> dict[str, dict[str, Any]]:
        with self._read():
            found = {trial_id: self._hints[trial_id] for trial_id in trial_ids if trial_id in self._hints}
            over = [name for name in trial_ids if name in self._trials and self._trials[name].state.is_final]
        return found if self._archive is None or not over else found | self._archive.hints(over)

    def add_report(self, report: Report) -> bool:
        """Add a report; False for a step that was reported before, which keeps its first value."""
        with self._backing.noting():
            book = self._book(self.trial(report.trial_id).spec.study)
            if book.has(report.trial_id, report.step):
                return False
            self._backing.append(report)
            with self._lock:
                book.add(report)
            return True

    def reports(self, study: str) -> list[Report]:
        with self._read():
            return self._book(study).rows()

    def trial_reports(self, trial_id: str) -> list[Report]:
        """Return one trial's reports in order of steps."""
        with self._read():
            return list(self._book(self.trial(trial_id).spec.study).of(trial_id))

    def latest_reports(self, study: str) -> dict[str, Report]:
        with self._read():
            return self._book(study).latest()

    def _book(self, study: str) -> ReportBook:
        return self._reports.setdefault(study, ReportBook())

    def add_history(self, entry: HistoryEntry) -> None:
        if self._archive is not None and not entry.resizes:
            self._backing.append(entry)
            return
        with self._backing.noting():
            self._backing.append(entry)
            with self._lock:
                self._history.setdefault(entry.trial_id, []).append(entry)

    def history(self, trial_id: str) -> list[HistoryEntry]:
        if self._archive is not None:
            return self._archive.history(trial_id)
        with self._lock:
            return list(self._history.get(trial_id, ()))

    def recent_history(self, *, limit: int, until: float | None = None, study: str | None = None) -> list[HistoryEntry]:
        """Return the latest ``limit`` entries of all trials or a study's, not younger than ``until``, newest first.

        Those of one moment come in one order however often they are asked for.
        """
        if self._archive is not None:
            return self._archive.recent_history(limit=limit, until=until, study=study)
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
        """Return changes of the number of replicas, of all trials, oldest first."""
        with self._read():
            entries = [entry for entries in self._history.values() for entry in entries if entry.resizes]
        return sorted(entries, key=lambda entry: entry.at)

    def slot_intervals(self) -> list[SlotInterval]:
        return [SlotInterval.of(row) for row in self.replicas(live_only=False)]


class ReportBook:
    def __init__(self) -> None:
        self._reports_by_trial: dict[str, dict[int, Report]] = {}
        self._sorted: dict[str, list[Report]] = {}
        """Sorted reports of the trials that have reported nothing since they were asked for."""
        self._names: list[str] | None = None
        self._last: dict[str, int] = {}
        """Highest step of each trial."""

    def add(self, report: Report) -> None:
        """Add a report; a step that was reported before keeps its first value."""
        if report.trial_id not in self._reports_by_trial:
            self._reports_by_trial[report.trial_id] = {}
            self._names = None
        if self._reports_by_trial[report.trial_id].setdefault(report.step, report) is report:
            self._sorted.pop(report.trial_id, None)
            self._last[report.trial_id] = max(report.step, self._last.get(report.trial_id, report.step))

    def has(self, trial_id: str, step: int) -> bool:
        return step in self._reports_by_trial.get(trial_id, ())

    def has_any(self, trial_id: str) -> bool:
        return bool(self._reports_by_trial.get(trial_id))

    def of(self, trial_id: str) -> list[Report]:
        """Return the trial's reports in order of steps."""
        reports = self._sorted.get(trial_id)
        if reports is None:
            steps = self._reports_by_trial.get(trial_id, {})
            reports = [steps[step] for step in sorted(steps)]
            if trial_id in self._reports_by_trial:
                self._sorted[trial_id] = reports
        return reports

    def latest(self) -> dict[str, Report]:
        return {name: steps[self._last[name]] for name, steps in self._reports_by_trial.items() if steps}

    def forget_trial(self, trial_id: str) -> None:
        self._reports_by_trial.pop(trial_id, None)
        self._sorted.pop(trial_id, None)
        self._last.pop(trial_id, None)
        self._names = None

    def rows(self) -> list[Report]:
        """All, in order of trial and step."""
        if self._names is None:
            self._names = sorted(self._reports_by_trial)
        found: list[Report] = []
        for name in self._names:
            found += self.of(name)
        return found
