"""The tables that a database of trials has. A database of another version is refused."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Engine, RowMapping

from trials.errors import StoreUnavailable
from trials.record import AS_THEY_ARE, Outcome, Reason, TrialRecord
from trials.spec import TrialSpec
from trials.states import TrialState
from trials.store.base import HistoryEntry

VERSION = 1
metadata = sa.MetaData()
about = sa.Table("about", metadata, sa.Column("version", sa.Integer, primary_key=True))

studies = sa.Table(
    "studies",
    metadata,
    sa.Column("name", sa.String(255), primary_key=True),
    sa.Column("title", sa.String(255), nullable=False),
    sa.Column("direction", sa.String(16), nullable=False),
    sa.Column("terms", sa.Text, nullable=False),
    sa.Column("owner", sa.String(64)),
    sa.Column("owner_seen_at", sa.Float),
    sa.Column("user", sa.String(255), nullable=False, default=""),
)

trials = sa.Table(
    "trials",
    metadata,
    sa.Column("position", sa.Integer, primary_key=True, autoincrement=True),
    sa.Column("trial_id", sa.String(64), nullable=False, unique=True),
    sa.Column("study", sa.String(255), nullable=False, index=True),
    sa.Column("number", sa.Integer, nullable=False),
    sa.Column("spec", sa.Text, nullable=False),
    sa.Column("state", sa.String(16), nullable=False, index=True),
    sa.Column("reason_code", sa.String(64), nullable=False),
    sa.Column("reason_sentence", sa.Text, nullable=False),
    sa.Column("submitted_at", sa.Float, nullable=False),
    sa.Column("finished_at", sa.Float),
    sa.Column("generation", sa.Integer, nullable=False, default=0),
    sa.Column("members", sa.Text, nullable=False, default="[]"),
    sa.Column("published", sa.Integer, nullable=False, default=0),
    sa.Column("published_members", sa.Text, nullable=False, default="[]"),
    sa.Column("published_at", sa.Float, nullable=False, default=0.0),
    sa.Column("join_epoch", sa.Integer),
    sa.Column("entered", sa.Integer, nullable=False, default=0),
    sa.Column("abandoned", sa.Integer, nullable=False, default=0),
    sa.Column("rescaled_at", sa.Float, nullable=False, default=0.0),
    sa.Column("layout", sa.String(64), nullable=False, default=""),
    sa.Column("losses", sa.Integer, nullable=False, default=0),
    sa.Column("outcome", sa.Text),
    sa.Column("cancel_requested", sa.Text),
    sa.Column("hold", sa.Text),
    sa.Column("parameters", sa.Text, nullable=False, default="{}"),
    sa.UniqueConstraint("study", "number"),
)

replicas = sa.Table(
    "replicas",
    metadata,
    sa.Column("replica_id", sa.String(64), primary_key=True),
    sa.Column("trial_id", sa.String(64), nullable=False, index=True),
    sa.Column("node", sa.String(255), nullable=False),
    sa.Column("slot", sa.Integer, nullable=False),
    sa.Column("launch_index", sa.Integer, nullable=False),
    sa.Column("state", sa.String(16), nullable=False, index=True),
    sa.Column("join_epoch", sa.Integer),
    sa.Column("pid", sa.Integer),
    sa.Column("process_started", sa.Float),
    sa.Column("launched_at", sa.Float, nullable=False),
    sa.Column("contact_at", sa.Float),
    sa.Column("ready_at", sa.Float),
    sa.Column("retry_join", sa.Boolean, nullable=False, default=False),
    sa.Column("gone_at", sa.Float),
    sa.Column("exit_status", sa.Integer),
    sa.Column("stop_requested_at", sa.Float),
    sa.Column("job", sa.String(64), nullable=False),
)

hints = sa.Table(
    "hints",
    metadata,
    sa.Column("trial_id", sa.String(64), primary_key=True),
    sa.Column("document", sa.Text, nullable=False),
)

reports = sa.Table(
    "reports",
    metadata,
    sa.Column("trial_id", sa.String(64), primary_key=True),
    sa.Column("step", sa.BigInteger, primary_key=True),
    sa.Column("value", sa.Float),
    sa.Column("progress", sa.Float, nullable=False),
    sa.Column("at", sa.Float),
)

measurements = sa.Table(
    "measurements",
    metadata,
    sa.Column("entry", sa.Integer, primary_key=True, autoincrement=True),
    sa.Column("trial_id", sa.String(64), nullable=False, index=True),
    sa.Column("at", sa.Float, nullable=False),
    sa.Column("progress", sa.Float, nullable=False),
    sa.Column("replicas", sa.Integer, nullable=False),
    sa.Column("batch", sa.BigInteger, nullable=False),
    sa.Column("goodput", sa.Float, nullable=False),
    sa.Column("predicted_goodput", sa.Float),
    sa.Column("noise_scale", sa.Float),
    sa.Column("learning_rate", sa.Float),
    sa.Column("step_seconds", sa.Float),
    sa.Column("pause_seconds", sa.Float),
)

history = sa.Table(
    "history",
    metadata,
    sa.Column("entry", sa.Integer, primary_key=True, autoincrement=True),
    sa.Column("at", sa.Float, nullable=False),
    sa.Column("trial_id", sa.String(64), nullable=False, index=True),
    sa.Column("who", sa.String(64), nullable=False),
    sa.Column("what", sa.Text, nullable=False),
    sa.Column("reason_code", sa.String(64), nullable=False),
    sa.Column("reason_sentence", sa.Text, nullable=False),
    sa.Column("numbers", sa.Text, nullable=False, default="{}"),
)


def make_tables(engine: Engine) -> None:
    """Create the tables where there are none. Raises StoreUnavailable for those of another version."""
    with engine.connect() as connection:
        present = sa.inspect(connection).get_table_names()
    if not present:
        _create(engine)
        return
    with engine.connect() as connection:
        found = connection.execute(sa.select(about.c.version)).scalar() if about.name in present else None
    if found != VERSION:
        raise StoreUnavailable(
            f"the database {engine.url.render_as_string()} has tables of version {found or 'unknown'}, and this "
            f"version of elastune reads {VERSION}; use the version that made it, or another state folder"
        )


def _create(engine: Engine) -> None:
    """Create the tables in one transaction: a process that dies meanwhile leaves none."""
    with engine.begin() as connection:
        if engine.dialect.name == "sqlite":
            # Its driver opens none before changes of tables unless it is told to.
            connection.exec_driver_sql("BEGIN IMMEDIATE")
        if not sa.inspect(connection).get_table_names():
            metadata.create_all(connection)
            connection.execute(about.insert().values(version=VERSION))


def entry_of(row: Any) -> HistoryEntry:
    return HistoryEntry(
        at=row.at,
        trial_id=row.trial_id,
        who=row.who,
        what=row.what,
        reason=Reason(code=row.reason_code, sentence=row.reason_sentence),
        numbers=json.loads(row.numbers),
    )


def trial_of(row: RowMapping) -> TrialRecord:
    outcome = json.loads(row["outcome"]) if row["outcome"] else None
    return TrialRecord(
        trial_id=row["trial_id"],
        spec=TrialSpec.from_json(json.loads(row["spec"])),
        state=TrialState(row["state"]),
        reason=Reason(code=row["reason_code"], sentence=row["reason_sentence"]),
        submitted_at=row["submitted_at"],
        members=tuple(json.loads(row["members"])),
        published_members=tuple(json.loads(row["published_members"])),
        outcome=Outcome(**outcome) if outcome else None,
        cancel_requested=row["cancel_requested"],
        parameters=json.loads(row["parameters"]),
        **{name: row[name] for name in AS_THEY_ARE},
    )


def spec_values(record: TrialRecord) -> dict[str, Any]:
    """Return the columns of a trial that never change."""
    return {
        "trial_id": record.trial_id,
        "study": record.spec.study,
        "number": record.spec.number,
        "spec": json.dumps(record.spec.to_json()),
        "submitted_at": record.submitted_at,
    }


def trial_values(record: TrialRecord) -> dict[str, Any]:
    """Return the columns of a trial that change."""
    return {
        "state": record.state.value,
        "reason_code": record.reason.code,
        "reason_sentence": plain(record.reason.sentence),
        "members": json.dumps(record.members),
        "published_members": json.dumps(record.published_members),
        "outcome": None if record.outcome is None else json.dumps(asdict(record.outcome)),
        "cancel_requested": None if record.cancel_requested is None else plain(record.cancel_requested),
        "parameters": json.dumps(dict(record.parameters)),
        **{name: getattr(record, name) for name in AS_THEY_ARE},
    }


def entry_values(entry: HistoryEntry) -> dict[str, Any]:
    return {
        "at": entry.at,
        "trial_id": entry.trial_id,
        "who": entry.who,
        "what": entry.what,
        "reason_code": entry.reason.code,
        "reason_sentence": plain(entry.reason.sentence),
        "numbers": json.dumps(dict(entry.numbers)),
    }


def plain(text: str) -> str:
    """Return text without what a database cannot hold: half of a surrogate pair, and for PostgreSQL the character 0."""
    return text.encode("utf-8", "replace").decode().replace("\0", "\N{REPLACEMENT CHARACTER}")
