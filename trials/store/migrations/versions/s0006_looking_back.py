"""What people look at afterwards: parameters, when reports came, how trials trained, what decisions weighed, whose."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"


def upgrade() -> None:
    for table, column, default in (
        ("studies", "user", ""),
        ("trials", "parameters", "{}"),
        ("history", "numbers", "{}"),
    ):
        kind = sa.String(255) if table == "studies" else sa.Text()
        with op.batch_alter_table(table) as batch:
            batch.add_column(sa.Column(column, kind, nullable=False, server_default=default))
        with op.batch_alter_table(table) as batch:
            batch.alter_column(column, server_default=None)
    with op.batch_alter_table("reports") as batch:
        batch.add_column(sa.Column("at", sa.Float))
    op.create_table(
        "measurements",
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
    )
