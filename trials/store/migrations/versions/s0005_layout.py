"""A trial keeps how its replicas hold the model, where that was chosen for it."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"


def upgrade() -> None:
    with op.batch_alter_table("trials") as batch:
        batch.add_column(sa.Column("layout", sa.String(64), nullable=False, server_default=""))
    with op.batch_alter_table("trials") as batch:
        batch.alter_column("layout", server_default=None)
