"""The tables as the present version needs them; `migrations/` brings those of earlier versions here."""

from __future__ import annotations

import sqlalchemy as sa

metadata = sa.MetaData()

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
