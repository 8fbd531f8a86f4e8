"""SqlBacking: keeps a store's trials in a SQL database, through SQLAlchemy Core.

SQLite runs in WAL mode with full synchronisation: a committed row survives a killed process and a power cut. Writers
are serialised by the database; connections are not shared between threads.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import threading
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict
from typing import Any

import sqlalchemy as sa
from sqlalchemy import event, select
from sqlalchemy.engine import Connection, Engine
from sqlalchemy.exc import DatabaseError, DBAPIError, InterfaceError, InternalError, OperationalError
from sqlalchemy.exc import TimeoutError as PoolTimeout

from trials.errors import StateFolderInUse, StoreUnavailable, UnknownTrial
from trials.record import Measurement, ReplicaRecord, ReplicaState, Report, Study, TrialRecord
from trials.spec import TrialSpec
from trials.store.base import RESIZE, Backing, HistoryEntry, StoreContent
from trials.store.memory import TrialStore
from trials.store.tables import entry_of, entry_values, make_tables, spec_values, trial_of, trial_values
from trials.store.tables import hints as _hints
from trials.store.tables import history as _history
from trials.store.tables import measurements as _measurements
from trials.store.tables import replicas as _replicas
from trials.store.tables import reports as _reports
from trials.store.tables import studies as _studies
from trials.store.tables import trials as _trials
from trials.terms import StudyTerms

_alive = _replicas.c.state != ReplicaState.GONE.value

HINTS_SECONDS = 5.0
"""A trial's hints are written no more often: replicas send them anew within seconds, so a crash loses nothing."""


class SqlBacking(Backing):
    """Keeps a store's trials in a SQL database.

    ``url`` is SQLAlchemy's, such as ``sqlite:////var/lib/elastune/trials.db`` or ``postgresql+psycopg://host/name``.

    ``exclusive``: on a server, which has no folder to lock, refuse a database that another scheduler works with
    (StateFolderInUse). Besides what a store asks of it, it answers all questions that read, for whoever looks at a
    database that a scheduler owns or has left.
    """

    def __init__(self, url: str, *, exclusive: bool = False) -> None:
        self._memory: TrialStore | None = None
        super().__init__()
        self._stale = True
        self._hints_written_at: dict[str, float] = {}
        self._hints_to_write: dict[str, dict[str, Any]] = {}
        """Hints that came too soon after the last that were written."""
        self._engine = engine_for(url)
        self._claim: Connection | None = None
        self._claim_lock = threading.Lock()
        try:
            self._exclusive = exclusive and self._engine.dialect.name == "postgresql"
            self._keep_claim()
            make_tables(self._engine)
        except BaseException as error:
            self.close()
            if isinstance(error, DatabaseError):
                shown = self._engine.url.render_as_string()
                raise StoreUnavailable(f"the database {shown} cannot be opened: {error.orig}") from error
            raise

    def close(self) -> None:
        if self._hints_to_write:
            with contextlib.suppress(StoreUnavailable), self._changing, self._write() as connection:
                self._write_hints(connection, list(self._hints_to_write))
        if self._claim is not None:
            self._claim.close()
        self._engine.dispose()

    def _keep_claim(self) -> None:
        """Keep the claim on the database before each write: a server that was restarted has forgotten it."""
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
                f"the database did not accept a write: {words}; free some disk space, or check the database server"
            ) from error

    @contextmanager
    def _read(self) -> Iterator[Connection]:
        try:
            with self._engine.connect() as connection:
                yield connection
        except (OperationalError, InterfaceError, InternalError, PoolTimeout) as error:
            raise StoreUnavailable(f"the database cannot be read: {error}") from error

    # ------------------------------------------------------------------ one change at a time

    @property
    def archive(self) -> SqlBacking:
        return self

    def load(self, memory: TrialStore) -> None:
        self._memory = memory
        self.catch_up()

    def catch_up(self) -> None:
        if not self._stale or self._memory is None:
            return
        with self._changing:
            studies, trials = self.studies(), self.trials()
            live = [trial.trial_id for trial in trials if not trial.state.is_final]
            kept = StoreContent(
                studies=studies,
                trials=trials,
                live_replicas=self.replicas(),
                reports={name: self.reports(name) for name in {trial.spec.study for trial in trials}},
                hints={**self.hints(live), **self._hints_to_write},
                resizes=self.resizes(),
            )
            self._memory.replace_all(kept)
            self._stale = False

    @contextmanager
    def changing(self, trial_ids: Sequence[str] = ()) -> Iterator[None]:
        with self._changing:
            self.catch_up()
            try:
                yield
            except UnknownTrial:
                raise
            except BaseException:
                self._stale = True
                raise

    def noting(self) -> AbstractContextManager[None]:
        return self.changing()

    def name_of(self, spec: TrialSpec) -> str:
        return f"t{uuid.uuid4().hex[:10]}"

    # ------------------------------------------------------------------ studies

    def save_lease(self, study: Study) -> None:
        self.save_study(study)

    def save_study(self, study: Study) -> Study:
        values = {**asdict(study), "terms": json.dumps(study.terms.to_json())}
        with self._write() as connection:
            updated = connection.execute(_studies.update().where(_studies.c.name == study.name).values(**values))
            if not updated.rowcount:
                connection.execute(_studies.insert().values(**values))
        return study

    def forget_study(self, name: str) -> None:
        with self._write() as connection:
            connection.execute(_studies.delete().where(_studies.c.name == name))

    def studies(self) -> list[Study]:
        with self._read() as connection:
            rows = connection.execute(select(_studies)).mappings()
            return [Study(**{**row, "terms": StudyTerms.from_json(json.loads(row["terms"]))}) for row in rows]

    # ------------------------------------------------------------------ trials

    def add_trial(self, record: TrialRecord) -> TrialRecord:
        with self._write() as connection:
            connection.execute(_trials.insert().values(**spec_values(record), **trial_values(record)))
        return record

    def save_trials(self, records: Sequence[TrialRecord]) -> Sequence[TrialRecord]:
        with self._write() as connection:
            for record in records:
                meant = _trials.c.trial_id == record.trial_id
                connection.execute(_trials.update().where(meant).values(**trial_values(record)))
            ended = [record.trial_id for record in records if record.state.is_final]
            self._write_hints(connection, ended)
        for trial_id in ended:
            # What comes after its end is written at once: nothing follows that would bring it along.
            self._hints_written_at.pop(trial_id, None)
        return records

    def trials(self) -> list[TrialRecord]:
        with self._read() as connection:
            rows = connection.execute(select(_trials).order_by(_trials.c.position))
            return [trial_of(row) for row in rows.mappings()]

    def forget_trials(self, trial_ids: Sequence[str]) -> None:
        """Forget the trials with all that is kept of them."""
        with self._write() as connection:
            for table in (_reports, _hints, _measurements, _history, _replicas, _trials):
                connection.execute(table.delete().where(table.c.trial_id.in_(list(trial_ids))))
        for trial_id in trial_ids:
            self._hints_written_at.pop(trial_id, None)
            self._hints_to_write.pop(trial_id, None)

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

    def save_replicas(self, replicas: Sequence[ReplicaRecord], fields: Sequence[str]) -> None:
        with self._write() as connection:
            for replica in replicas:
                row = {**asdict(replica), "state": replica.state.value}
                values = {name: row[name] for name in fields}
                meant = _replicas.c.replica_id == replica.replica_id
                connection.execute(_replicas.update().where(meant).values(**values))

    # ------------------------------------------------------------------ hints, reports, history

    def save_hints(self, trial_id: str, hints: Mapping[str, Any], measured: Measurement | None) -> None:
        self._hints_to_write[trial_id] = dict(hints)
        is_due = time.monotonic() - self._hints_written_at.get(trial_id, float("-inf")) >= HINTS_SECONDS
        if is_due or measured is not None:
            with self._write() as connection:
                self._write_hints(connection, [trial_id])
                if measured is not None:
                    connection.execute(_measurements.insert().values(**asdict(measured)))

    def _write_hints(self, connection: Connection, trial_ids: Sequence[str]) -> None:
        """Write the hints of these trials, where they have not been written."""
        for trial_id in trial_ids:
            hints = self._hints_to_write.pop(trial_id, None)
            if hints is not None:
                self._hints_written_at[trial_id] = time.monotonic()
                document, meant = json.dumps(hints), _hints.c.trial_id == trial_id
                if not connection.execute(_hints.update().where(meant).values(document=document)).rowcount:
                    connection.execute(_hints.insert().values(trial_id=trial_id, document=document))

    def measurements(self, trial_id: str) -> list[Measurement]:
        columns = [column for column in _measurements.c if column.name != "entry"]
        query = select(*columns).where(_measurements.c.trial_id == trial_id).order_by(_measurements.c.entry)
        with self._read() as connection:
            return [Measurement(**row) for row in connection.execute(query).mappings()]

    def hints(self, trial_ids: Sequence[str]) -> dict[str, dict[str, Any]]:
        with self._read() as connection:
            rows = connection.execute(select(_hints).where(_hints.c.trial_id.in_(list(trial_ids))))
            return {row.trial_id: json.loads(row.document) for row in rows}

    def append(self, fact: Report | HistoryEntry) -> None:
        with self._write() as connection:
            if isinstance(fact, Report):
                connection.execute(_reports.insert().values(**asdict(fact)))
            else:
                connection.execute(_history.insert().values(**entry_values(fact)))

    def reports(self, study: str) -> list[Report]:
        query = (
            select(_reports)
            .join(_trials, _trials.c.trial_id == _reports.c.trial_id)
            .where(_trials.c.study == study)
            .order_by(_reports.c.trial_id, _reports.c.step)
        )
        with self._read() as connection:
            return [_report_of(row) for row in connection.execute(query)]

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


def _report_of(row: Any) -> Report:
    return Report(row.trial_id, row.step, row.value, row.progress, row.at)


def sql_store(url: str, *, exclusive: bool = False) -> TrialStore:
    """Return a trial store in the SQL database at ``url``, which one process at a time may use."""
    return TrialStore(SqlBacking(url, exclusive=exclusive))


BUSY_SECONDS = 10
"""Longest wait for another writer, or for a connection, before a write is given up as impossible for now."""


def _without_password(url: str) -> str:
    return re.sub(r"(?<=:)[^:@/]+(?=@)", "***", url)


def engine_for(url: str) -> Engine:
    if not url.startswith("sqlite"):
        try:
            return sa.create_engine(
                url, pool_pre_ping=True, pool_size=10, max_overflow=40, connect_args={"application_name": whoami()}
            )
        except (ModuleNotFoundError, sa.exc.NoSuchModuleError, sa.exc.ArgumentError, TypeError) as error:
            raise StoreUnavailable(
                f"the database {_without_password(url)} cannot be used: {error}; give "
                "postgresql+psycopg://USER@HOST/NAME and `pip install 'elastune[postgresql]'`, or leave it out for a "
                "file in the state folder"
            ) from error
    options: dict[str, Any] = {"connect_args": {"timeout": BUSY_SECONDS, "check_same_thread": False}}
    if url in ("sqlite://", "sqlite:///:memory:"):
        options["poolclass"] = sa.pool.StaticPool
    else:
        options |= {"pool_size": 10, "max_overflow": 40, "pool_timeout": BUSY_SECONDS}
    engine = sa.create_engine(url, **options)

    @event.listens_for(engine, "connect")
    def _prepare(connection: Any, _: Any) -> None:
        cursor = connection.cursor()
        cursor.execute("PRAGMA journal_mode=WAL")
        cursor.execute("PRAGMA synchronous=FULL")
        # Keeps the log near 1 MB: on a disk that is almost full a large one would be what fills it.
        cursor.execute("PRAGMA wal_autocheckpoint=250")
        cursor.close()

    return engine


_KEY = 0x656C6173
"""Number of the advisory lock: any, but always the same."""
LONGEST_NAME = 63


def whoami() -> str:
    """Return the scheduler's name among the server's clients."""
    return f"elastune pid {os.getpid()} on {socket.gethostname()}"[:LONGEST_NAME]


def claim(engine: Engine) -> Connection:
    """Return the connection that holds the lock, to be kept open; raise StateFolderInUse with its holder's name."""
    connection = engine.connect().execution_options(isolation_level="AUTOCOMMIT")
    if connection.execute(sa.select(sa.func.pg_try_advisory_lock(_KEY))).scalar_one():
        return connection
    holder = connection.execute(
        sa.text(
            "SELECT application_name FROM pg_stat_activity JOIN pg_locks USING (pid) "
            "WHERE locktype = 'advisory' AND objid = :key AND granted AND pg_locks.database = "
            "(SELECT oid FROM pg_database WHERE datname = current_database())"
        ),
        {"key": _KEY},
    ).scalar()
    connection.close()
    raise StateFolderInUse(
        f"the database {engine.url.render_as_string()} belongs to a running scheduler ({holder or 'unknown'}); set "
        "ELASTUNE_URL to use it, stop it, or choose another database"
    )
