"""A study's weight becomes one of its terms."""

from __future__ import annotations

import json

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"


def upgrade() -> None:
    with op.batch_alter_table("studies") as batch:
        batch.add_column(sa.Column("terms", sa.Text, nullable=False, server_default="{}"))
    studies = sa.table("studies", sa.column("name"), sa.column("weight"), sa.column("terms"))
    connection = op.get_bind()
    for row in connection.execute(sa.select(studies.c.name, studies.c.weight)).all():
        terms = json.dumps({"weight": row.weight})
        connection.execute(studies.update().where(studies.c.name == row.name).values(terms=terms))
    with op.batch_alter_table("studies") as batch:
        batch.drop_column("weight")
        batch.alter_column("terms", server_default=None)
