"""A study keeps what its people call it."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"


def upgrade() -> None:
    with op.batch_alter_table("studies") as batch:
        batch.add_column(sa.Column("title", sa.String(255), nullable=False, server_default=""))
    with op.batch_alter_table("studies") as batch:
        batch.alter_column("title", server_default=None)
