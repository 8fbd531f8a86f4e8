"""Trials in a SQL database through SQLAlchemy Core.

SQLite runs in WAL mode with full synchronisation: a committed row survives a killed process and a power cut. Writers
are serialised by the database; connections are not shared between threads.
"""

from __future__ import annotations

import json
import threading
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

import sqlalchemy as sa
from sqlalchemy import select
from sqlalchemy.engine import Connection
from sqlalchemy.exc import DatabaseError, DBAPIError, IntegrityError, InterfaceError, InternalError, OperationalError
from sqlalchemy.exc import TimeoutError as PoolTimeout

from trials.errors import StateFolderInUse, StoreUnavailable, UnknownTrial
from trials.record import Measurement, Outcome, Reason, ReplicaRecord, ReplicaState, Report, Study, TrialRecord
from trials.spec import TrialSpec
from trials.states import FINAL_STATES, TrialState
from trials.store.base import AIM_AGAIN, RESIZE, HistoryEntry, SlotInterval
from trials.store.claim import claim
from trials.store.engine import engine_for
from trials.store.rows import entry_of, plain, trial_of
from trials.store.schema import bring_up_to_date
from trials.store.tables import hints as _hints
from trials.store.tables import history as _history
from trials.store.tables import measurements as _measurements
from trials.store.tables import replicas as _replicas
from trials.store.tables import reports as _reports
from trials.store.tables import studies as _studies
from trials.store.tables import trials as _trials
from trials.terms import StudyTerms

_alive = _replicas.c.state != ReplicaState.GONE.value


class SqlTrialStore:
    """``url`` is SQLAlchemy's, such as ``sqlite:////var/lib/elastune/trials.db`` or ``postgresql+psycopg://host/name``.

    ``exclusive``: on a server, which has no folder to lock, refuse a database that another scheduler works with
    (StateFolderInUse). ``migrate``: else tables of an earlier version are refused too, because somebody may use them.
    """

    def __init__(self, url: str, *, exclusive: bool = False, migrate: bool = True) -> None:
        self._engine = engine_for(url)
        self._claim: Connection | None = None
        self._claim_lock = threading.Lock()
        try:
            self._exclusive = exclusive and self._engine.dialect.name == "postgresql"
            self._keep_claim()
            bring_up_to_date(self._engine, migrate=migrate)
        except BaseException as error:
            self.close()
            if isinstance(error, DatabaseError):
                shown = self._engine.url.render_as_string()
                raise StoreUnavailable(f"the database {shown} cannot be opened: {error.orig}") from error
            raise

    def close(self) -> None:
        if self._claim is not None:
            self._claim.close()
        self._engine.dispose()

    def _keep_claim(self) -> None:
        """Before each write: a server that was restarted has forgotten whose the database is."""
        if not self._exclusive:
            return
        with self._claim_lock:
            if self._claim is not None:
                try:
                    self._claim.execute(select(1))
                except DBAPIError:
                    self._claim.invalidate()
                    self._claim.close()
                    self._claim = None
            self._claim = self._claim or claim(self._engine)

    @contextmanager
    def _write(self) -> Iterator[Connection]:
        try:
            self._keep_claim()
            with self._engine.begin() as connection:
                yield connection
        except StateFolderInUse as error:
            raise StoreUnavailable(f"the connection to the database was lost, and meanwhile {error}") from error
        except (OperationalError, InterfaceError, InternalError, PoolTimeout) as error:
            words = getattr(error, "orig", None) or error
            raise StoreUnavailable(
                f"the database did not take a write: {words}; free some space, or look after its server"
            ) from error

    @contextmanager
    def _read(self) -> Iterator[Connection]:
        try:
            with self._engine.connect() as connection:
                yield connection
        except (OperationalError, InterfaceError, InternalError, PoolTimeout) as error:
            raise StoreUnavailable(f"the database cannot be read: {error}") from error

    # ------------------------------------------------------------------ studies

    def put_study(self, study: Study) -> None:
        values = {**asdict(study), "terms": json.dumps(study.terms.to_json())}
        with self._write() as connection:
            updated = connection.execute(_studies.update().where(_studies.c.name == study.name).values(**values))
            if not updated.rowcount:
                connection.execute(_studies.insert().values(**values))

    def set_terms(self, name: str, terms: StudyTerms) -> None:
        with self._write() as connection:
            values = {"terms": json.dumps(terms.to_json())}
            connection.execute(_studies.update().where(_studies.c.name == name).values(**values))

    def touch_study(self, name: str, owner: str, now: float) -> bool:
        mine = (_studies.c.name == name) & (_studies.c.owner == owner)
        with self._write() as connection:
            return bool(connection.execute(_studies.update().where(mine).values(owner_seen_at=now)).rowcount)

    def disown_study(self, name: str, owner: str) -> None:
        mine = (_studies.c.name == name) & (_studies.c.owner == owner)
        with self._write() as connection:
            connection.execute(_studies.update().where(mine).values(owner=None))

    def studies(self) -> list[Study]:
        with self._read() as connection:
            rows = connection.execute(select(_studies)).mappings()
            return [Study(**{**row, "terms": StudyTerms.from_json(json.loads(row["terms"]))}) for row in rows]

    # ------------------------------------------------------------------ trials

    def submit(self, spec: TrialSpec, now: float) -> TrialRecord:
        trial_id = f"t{uuid.uuid4().hex[:10]}"
        reason = Reason(code="submitted", sentence="waits for the next look at the cluster")
        try:
            with self._write() as connection:
                connection.execute(
                    _trials.insert().values(
                        trial_id=trial_id,
                        study=spec.study,
                        number=spec.number,
                        spec=json.dumps(spec.to_json()),
                        state=TrialState.PENDING.value,
                        reason_code=reason.code,
                        reason_sentence=reason.sentence,
                        submitted_at=now,
                    )
                )
        except IntegrityError:
            pass
        same = (_trials.c.study == spec.study) & (_trials.c.number == spec.number)
        with self._read() as connection:
            row = connection.execute(select(_trials).where(same)).mappings().one()
        return trial_of(row)

    def trials(self, *, live_only: bool = False) -> list[TrialRecord]:
        query = select(_trials).order_by(_trials.c.position)
        if live_only:
            query = query.where(_trials.c.state.not_in([state.value for state in FINAL_STATES]))
        with self._read() as connection:
            return [trial_of(row) for row in connection.execute(query).mappings()]

    def trial(self, trial_id: str) -> TrialRecord:
        with self._read() as connection:
            row = connection.execute(select(_trials).where(_trials.c.trial_id == trial_id)).mappings().one_or_none()
        if row is None:
            raise UnknownTrial(f"no trial is called {trial_id!r}; `elastune ls` lists them")
        return trial_of(row)

    def save_trial(self, record: TrialRecord) -> None:
        with self._write() as connection:
            connection.execute(
                _trials.update()
                .where(_trials.c.trial_id == record.trial_id)
                .values(
                    state=record.state.value,
                    reason_code=record.reason.code,
                    reason_sentence=plain(record.reason.sentence),
                    finished_at=record.finished_at,
                    generation=record.generation,
                    members=json.dumps(record.members),
                    published=record.published,
                    published_members=json.dumps(record.published_members),
                    published_at=record.published_at,
                    join_epoch=record.join_epoch,
                    rescaled_at=record.rescaled_at,
                    layout=record.layout,
                    losses=record.losses,
                )
            )

    def set_outcome(self, trial_id: str, outcome: Outcome) -> bool:
        first = (_trials.c.trial_id == trial_id) & _trials.c.outcome.is_(None)
        with self._write() as connection:
            return bool(
                connection.execute(_trials.update().where(first).values(outcome=json.dumps(asdict(outcome)))).rowcount
            )

    def note_entered(self, trial_id: str, generation: int) -> None:
        self._raise_to(trial_id, _trials.c.entered, generation)

    def note_abandoned(self, trial_id: str, generation: int) -> None:
        self._raise_to(trial_id, _trials.c.abandoned, generation)

    def _raise_to(self, trial_id: str, column: sa.Column[int], number: int) -> None:
        lower = (_trials.c.trial_id == trial_id) & (column < number)
        with self._write() as connection:
            connection.execute(_trials.update().where(lower).values({column: number}))

    def request_cancel(self, trial_id: str, why: str) -> None:
        with self._write() as connection:
            connection.execute(
                _trials.update().where(_trials.c.trial_id == trial_id).values(cancel_requested=plain(why))
            )

    def put_parameters(self, trial_id: str, parameters: Mapping[str, Any]) -> None:
        meant = _trials.c.trial_id == trial_id
        with self._write() as connection:
            known = connection.execute(select(_trials.c.parameters).where(meant)).scalar_one_or_none()
            if known is None:
                raise UnknownTrial(f"no trial is called {trial_id!r}; `elastune ls` lists them")
            connection.execute(
                _trials.update().where(meant).values(parameters=json.dumps({**json.loads(known), **parameters}))
            )

    def hold(self, trial_ids: Sequence[str], why: str) -> None:
        live = _trials.c.trial_id.in_(list(trial_ids)) & _trials.c.state.not_in([state.value for state in FINAL_STATES])
        with self._write() as connection:
            connection.execute(_trials.update().where(live).values(hold=why))

    def release(self, trial_ids: Sequence[str]) -> None:
        held = _trials.c.trial_id.in_(list(trial_ids)) & _trials.c.hold.is_not(None)
        with self._write() as connection:
            connection.execute(_trials.update().where(held).values(hold=None))

    def forget_trials(self, trial_ids: Sequence[str]) -> None:
        """With all that is kept of them."""
        with self._write() as connection:
            for table in (_reports, _hints, _measurements, _history, _replicas, _trials):
                connection.execute(table.delete().where(table.c.trial_id.in_(list(trial_ids))))

    def forget_study(self, name: str) -> None:
        with self._write() as connection:
            connection.execute(_studies.delete().where(_studies.c.name == name))

    # ------------------------------------------------------------------ replicas

    def add_replica(self, replica: ReplicaRecord) -> None:
        with self._write() as connection:
            connection.execute(_replicas.insert().values(**{**asdict(replica), "state": replica.state.value}))

    def replicas(self, *, trial_id: str | None = None, live_only: bool = True) -> list[ReplicaRecord]:
        query = select(_replicas).order_by(_replicas.c.launched_at, _replicas.c.launch_index)
        if live_only:
            query = query.where(_alive)
        if trial_id is not None:
            query = query.where(_replicas.c.trial_id == trial_id)
        with self._read() as connection:
            return [
                ReplicaRecord(**{**row, "state": ReplicaState(row["state"])})
                for row in connection.execute(query).mappings()
            ]

    def update_replica(self, replica_id: str, **fields: Any) -> None:
        if isinstance(fields.get("state"), ReplicaState):
            fields["state"] = fields["state"].value
        meant = _replicas.c.replica_id == replica_id
        if fields.get("state") != ReplicaState.GONE.value:
            meant &= _alive
        with self._write() as connection:
            connection.execute(_replicas.update().where(meant).values(**fields))

    def retry_join(self, replica_id: str, aimed: int | None) -> None:
        # SQLAlchemy writes IS NULL for None.
        meant = (_replicas.c.replica_id == replica_id) & (_replicas.c.join_epoch == aimed)
        with self._write() as connection:
            connection.execute(
                _replicas.update().where(meant & _alive).values(**{**AIM_AGAIN, "state": AIM_AGAIN["state"].value})
            )

    def set_replica_state(self, replica_ids: Sequence[str], state: ReplicaState) -> None:
        meant = _replicas.c.replica_id.in_(list(replica_ids))
        with self._write() as connection:
            connection.execute(_replicas.update().where(meant & _alive).values(state=state.value))

    # ------------------------------------------------------------------ hints, reports, history

    def put_hints(self, trial_id: str, hints: Mapping[str, Any], measured: Measurement | None = None) -> None:
        document = json.dumps(hints)
        with self._write() as connection:
            updated = connection.execute(_hints.update().where(_hints.c.trial_id == trial_id).values(document=document))
            if not updated.rowcount:
                connection.execute(_hints.insert().values(trial_id=trial_id, document=document))
            if measured is not None:
                connection.execute(_measurements.insert().values(**asdict(measured)))

    def measurements(self, trial_id: str) -> list[Measurement]:
        columns = [column for column in _measurements.c if column.name != "entry"]
        query = select(*columns).where(_measurements.c.trial_id == trial_id).order_by(_measurements.c.entry)
        with self._read() as connection:
            return [Measurement(**row) for row in connection.execute(query).mappings()]

    def hints(self, trial_ids: Sequence[str]) -> dict[str, dict[str, Any]]:
        with self._read() as connection:
            rows = connection.execute(select(_hints).where(_hints.c.trial_id.in_(list(trial_ids))))
            return {row.trial_id: json.loads(row.document) for row in rows}

    def add_report(self, report: Report) -> None:
        try:
            with self._write() as connection:
                connection.execute(
                    _reports.insert().values(
                        trial_id=report.trial_id,
                        step=report.step,
                        value=report.value,
                        progress=report.progress,
                        at=report.at,
                    )
                )
        except IntegrityError:
            return

    def reports(self, study: str) -> list[Report]:
        query = (
            select(_reports)
            .join(_trials, _trials.c.trial_id == _reports.c.trial_id)
            .where(_trials.c.study == study)
            .order_by(_reports.c.trial_id, _reports.c.step)
        )
        with self._read() as connection:
            return [_report_of(row) for row in connection.execute(query)]

    def trial_reports(self, trial_id: str) -> list[Report]:
        query = select(_reports).where(_reports.c.trial_id == trial_id).order_by(_reports.c.step)
        with self._read() as connection:
            return [_report_of(row) for row in connection.execute(query)]

    def latest_reports(self, study: str) -> dict[str, Report]:
        last = select(_reports.c.trial_id, sa.func.max(_reports.c.step).label("step")).group_by(_reports.c.trial_id)
        latest = last.subquery()
        query = (
            select(_reports)
            .join(latest, (latest.c.trial_id == _reports.c.trial_id) & (latest.c.step == _reports.c.step))
            .join(_trials, _trials.c.trial_id == _reports.c.trial_id)
            .where(_trials.c.study == study)
        )
        with self._read() as connection:
            return {row.trial_id: _report_of(row) for row in connection.execute(query)}

    def has_reported(self, trial_id: str) -> bool:
        query = select(_reports.c.trial_id).where(_reports.c.trial_id == trial_id).limit(1)
        with self._read() as connection:
            return connection.execute(query).first() is not None

    def add_history(self, entry: HistoryEntry) -> None:
        with self._write() as connection:
            connection.execute(
                _history.insert().values(
                    at=entry.at,
                    trial_id=entry.trial_id,
                    who=entry.who,
                    what=entry.what,
                    reason_code=entry.reason.code,
                    reason_sentence=plain(entry.reason.sentence),
                    numbers=json.dumps(dict(entry.numbers)),
                )
            )

    def history(self, trial_id: str) -> list[HistoryEntry]:
        query = select(_history).where(_history.c.trial_id == trial_id).order_by(_history.c.entry)
        with self._read() as connection:
            return [entry_of(row) for row in connection.execute(query)]

    def recent_history(self, *, limit: int, until: float | None = None, study: str | None = None) -> list[HistoryEntry]:
        query = select(_history).order_by(_history.c.at.desc(), _history.c.entry.desc()).limit(limit)
        if until is not None:
            query = query.where(_history.c.at <= until)
        if study is not None:
            query = query.join(_trials, _trials.c.trial_id == _history.c.trial_id).where(_trials.c.study == study)
        with self._read() as connection:
            return [entry_of(row) for row in connection.execute(query)]

    def resizes(self) -> list[HistoryEntry]:
        query = select(_history).where(_history.c.what.endswith(RESIZE)).order_by(_history.c.at, _history.c.entry)
        with self._read() as connection:
            return [entry_of(row) for row in connection.execute(query)]

    def slot_intervals(self) -> list[SlotInterval]:
        with self._read() as connection:
            rows = connection.execute(select(_replicas).order_by(_replicas.c.launched_at, _replicas.c.launch_index))
            return [SlotInterval.of(row) for row in rows]


def _report_of(row: Any) -> Report:
    return Report(row.trial_id, row.step, row.value, row.progress, row.at)
