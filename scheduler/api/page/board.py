"""Changes that open pages have been told: each is worked out and written once for all pages.

A page that was away is told everything anew.

Callable from any thread. Nothing is looked at while no page is open.
"""

from __future__ import annotations

import json
import threading
from typing import Any, Protocol

from scheduler.api.client_access import ClientAccess
from scheduler.api.page.rows import interval_row, node_row, queue_row, report_row, study_row, trial_row
from scheduler.api.site import Site
from scheduler.api.tokens import Access, Identity
from scheduler.knowledge.waiting import expected_starts
from scheduler.loop.control_loop import ControlLoop
from scheduler.snapshot import Snapshot
from trials.record import ReplicaRecord, Report, TrialRecord
from trials.store import TrialStore
from trials.store.base import SlotInterval


class Shown(Protocol):
    """Scheduler as a page shows it."""

    store: TrialStore
    loop: ControlLoop
    site: Site

    def clock(self) -> float: ...


class Board:
    """Board for callers that may see the same."""

    def __init__(self, service: Shown, access: ClientAccess, client: Identity) -> None:
        self._service = service
        self._access = access
        self._client = client
        self._lock = threading.Lock()
        self._rows: dict[str, dict[str, Any]] = {}
        self._row_fingerprints: dict[str, tuple[Any, ...]] = {}
        self._latest: dict[str, Report] = {}
        self._intervals: dict[str, list[Any]] = {}
        self._reports: list[Report] = []
        self._decided_on: Snapshot | None = None
        self._expected: dict[str, float] = {}
        for study in access.seen_studies(client):
            self._latest |= service.store.latest_reports(study.name)
        self._look_at_trials([])
        self._studies = self._study_rows()
        self._nodes = [node_row(node) for node in service.site.nodes()]
        self._queue = self._queue_row()
        self._live: dict[str, ReplicaRecord] = {row.replica_id: row for row in service.store.replicas()}
        for interval in service.store.slot_intervals():
            self._put_interval(interval)

    # ------------------------------------------------------------------ for pages

    def everything(self) -> str:
        with self._lock:
            state = {
                "all": True,
                "now": self._service.clock(),
                "access": self._client.access.value,
                "emulated": self._service.site.emulated,
                "policy": self._service.loop.decisions.policy.name,
                "studies": self._studies,
                "nodes": self._nodes,
                "queue": self._queue,
                "trials": list(self._rows.values()),
                "intervals": list(self._intervals.values()),
            }
            return _written(state)

    def note_report(self, report: Report) -> None:
        self._reports.append(report)

    # ------------------------------------------------------------------ looking

    def look(self) -> str | None:
        """Return what has changed since the last look; None when nothing has. Raises StoreUnavailable."""
        with self._lock:
            try:
                return self._look()
            except BaseException:
                # What was found so far has been told to nobody: it is found again.
                self._row_fingerprints.clear()
                self._rows.clear()
                raise

    def _look(self) -> str | None:
        changed: dict[str, Any] = {}
        reports = list(self._reports)
        trials, gone = self._look_at_trials(reports)
        if trials:
            changed["trials"] = trials
        if gone:
            changed["gone"] = gone
        intervals = self._look_at_replicas()
        if intervals:
            changed["intervals"] = intervals
        mine = [report_row(report) for report in reports if report.trial_id in self._rows]
        if mine:
            changed["reports"] = mine
        studies, nodes = self._study_rows(), [node_row(node) for node in self._service.site.nodes()]
        if studies != self._studies:
            self._studies = changed["studies"] = studies
        if nodes != self._nodes:
            self._nodes = changed["nodes"] = nodes
        queue = self._queue_row()
        if queue != self._queue:
            self._queue = changed["queue"] = queue
        del self._reports[: len(reports)]
        return _written({"now": self._service.clock(), **changed}) if changed else None

    def _queue_row(self) -> dict[str, Any]:
        return queue_row(self._service.site.queue(), self._service.site.queue_trouble())

    def _study_rows(self) -> list[dict[str, Any]]:
        now = self._service.clock()
        return [study_row(study, now) for study in self._access.seen_studies(self._client)]

    def _look_at_trials(self, reports: list[Report]) -> tuple[list[dict[str, Any]], list[str]]:
        """Rows of trials that have changed, and ids of those that are forgotten."""
        for report in reports:
            known = self._latest.get(report.trial_id)
            if known is None or report.step >= known.step:
                self._latest[report.trial_id] = report
        records = self._access.seen_trials(self._client)
        hints = self._service.store.hints([record.trial_id for record in records if not record.state.is_final])
        self._look_ahead()
        changed = []
        for record in records:
            seen = self._facts(record, hints)
            before = self._row_fingerprints.get(record.trial_id)
            if before is not None and all(map(_same, before, seen)):
                continue
            self._row_fingerprints[record.trial_id] = seen
            row = trial_row(
                record,
                view=self._service.loop.observer.latest_views.get(record.trial_id),
                hints=hints.get(record.trial_id),
                latest=self._latest.get(record.trial_id),
                expected_start=self._expected.get(record.trial_id),
                for_reader=self._client.access is Access.READ,
            )
            if row != self._rows.get(record.trial_id):
                self._rows[record.trial_id] = row
                changed.append(row)
        gone = []
        if len(self._rows) > len(records):
            gone = list(self._rows.keys() - {record.trial_id for record in records})
            for trial_id in gone:
                for kept in (self._rows, self._row_fingerprints, self._latest):
                    kept.pop(trial_id, None)
                for replica_id in [name for name, row in self._intervals.items() if row[1] == trial_id]:
                    del self._intervals[replica_id]
        return changed, gone

    def _facts(self, record: TrialRecord, hints: dict[str, dict[str, Any]]) -> tuple[Any, ...]:
        """Return the objects that a row is made of, which are replaced when they change."""
        if record.state.is_final:
            return record, None, None, None, self._latest.get(record.trial_id), None
        view = self._service.loop.observer.latest_views.get(record.trial_id)
        return (
            record,
            hints.get(record.trial_id),
            None if view is None else view.promise,
            None if view is None else view.held_slots,
            self._latest.get(record.trial_id),
            self._expected.get(record.trial_id),
        )

    def _look_ahead(self) -> None:
        snapshot = self._service.loop.decisions.snapshot
        if snapshot is not None and snapshot is not self._decided_on:
            self._decided_on = snapshot
            # To the second: what moves by less is no news.
            starts = expected_starts(snapshot)
            self._expected = {name: float(round(snapshot.now + seconds)) for name, seconds in starts.items()}

    # ------------------------------------------------------------------ slots

    def _look_at_replicas(self) -> list[list[Any]]:
        store = self._service.store
        live = {row.replica_id: row for row in store.replicas()}
        ended = self._live.keys() - live.keys()
        began = live.keys() - self._live.keys()
        changed = [self._put_interval(SlotInterval.of(live[name])) for name in began]
        for trial_id in {self._live[name].trial_id for name in ended}:
            rows = store.replicas(trial_id=trial_id, live_only=False)
            changed += [self._put_interval(SlotInterval.of(row)) for row in rows if row.replica_id in ended]
        self._live = live
        return changed

    def _put_interval(self, interval: SlotInterval) -> list[Any]:
        row = interval_row(interval, mine=self._client.access is not Access.STUDY or interval.trial_id in self._rows)
        self._intervals[str(row[0])] = row
        return row


def _same(before: Any, now: Any) -> bool:
    return before is now or (isinstance(now, float | int) and before == now)


def _written(told: dict[str, Any]) -> str:
    return json.dumps(told, separators=(",", ":"), default=_plain)


def _plain(value: Any) -> Any:
    if isinstance(value, tuple | set | frozenset):
        return list(value)
    raise TypeError(f"a {type(value).__name__} cannot be sent to a page")
