"""The tables of the first version."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None


def upgrade() -> None:
    op.create_table(
        "studies",
        sa.Column("name", sa.String(255), primary_key=True),
        sa.Column("direction", sa.String(16), nullable=False),
        sa.Column("weight", sa.Float, nullable=False),
        sa.Column("owner", sa.String(64)),
        sa.Column("owner_seen_at", sa.Float),
    )
    op.create_table(
        "trials",
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
        sa.Column("generation", sa.Integer, nullable=False),
        sa.Column("members", sa.Text, nullable=False),
        sa.Column("published", sa.Integer, nullable=False),
        sa.Column("published_members", sa.Text, nullable=False),
        sa.Column("published_at", sa.Float, nullable=False),
        sa.Column("join_epoch", sa.Integer),
        sa.Column("entered", sa.Integer, nullable=False),
        sa.Column("abandoned", sa.Integer, nullable=False),
        sa.Column("rescaled_at", sa.Float, nullable=False),
        sa.Column("losses", sa.Integer, nullable=False),
        sa.Column("outcome", sa.Text),
        sa.Column("cancel_requested", sa.Text),
        sa.Column("hold", sa.Text),
        sa.UniqueConstraint("study", "number"),
    )
    op.create_table(
        "replicas",
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
    )
    op.create_table(
        "hints",
        sa.Column("trial_id", sa.String(64), primary_key=True),
        sa.Column("document", sa.Text, nullable=False),
    )
    op.create_table(
        "reports",
        sa.Column("trial_id", sa.String(64), primary_key=True),
        sa.Column("step", sa.Integer, primary_key=True),
        sa.Column("value", sa.Float),
        sa.Column("progress", sa.Float, nullable=False),
    )
    op.create_table(
        "history",
        sa.Column("entry", sa.Integer, primary_key=True, autoincrement=True),
        sa.Column("at", sa.Float, nullable=False),
        sa.Column("trial_id", sa.String(64), nullable=False, index=True),
        sa.Column("what", sa.Text, nullable=False),
        sa.Column("reason_code", sa.String(64), nullable=False),
        sa.Column("reason_sentence", sa.Text, nullable=False),
    )
