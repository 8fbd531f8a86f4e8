"""Entries of the history name who acted; steps may count tokens."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"


def upgrade() -> None:
    with op.batch_alter_table("history") as batch:
        batch.add_column(sa.Column("who", sa.String(64), nullable=False, server_default="scheduler"))
    with op.batch_alter_table("history") as batch:
        batch.alter_column("who", server_default=None)
    with op.batch_alter_table("reports") as batch:
        batch.alter_column("step", type_=sa.BigInteger, existing_type=sa.Integer, existing_nullable=False)
