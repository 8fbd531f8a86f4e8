"""A replica keeps with which job of a queue its slot came."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"


def upgrade() -> None:
    with op.batch_alter_table("replicas") as batch:
        batch.add_column(sa.Column("job", sa.String(64), nullable=False, server_default=""))
    with op.batch_alter_table("replicas") as batch:
        batch.alter_column("job", server_default=None)
