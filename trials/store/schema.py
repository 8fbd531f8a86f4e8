"""Brings a database to the present version of the tables, or refuses one that it does not know.

The steps between versions are Alembic's, in `migrations/`; it is loaded only where a step is missing. All of them run
in one transaction: a database is of the old version or of the new one, whenever the process dies.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import sqlalchemy as sa
from sqlalchemy.engine import Connection, Engine

from trials.errors import StoreUnavailable
from trials.store.tables import metadata

HEAD = "0008"
"""Number of the last step."""
_versions = sa.Table("alembic_version", sa.MetaData(), sa.Column("version_num", sa.String(32), primary_key=True))
_about = sa.table("about", sa.column("schema_version", sa.Integer))
"""How the versions before the first step counted."""


def bring_up_to_date(engine: Engine, *, migrate: bool = True) -> None:
    """Create or migrate the tables; raises StoreUnavailable for a version that is not known here.

    Without ``migrate`` nothing is changed, and tables of an earlier version are refused as well.
    """
    if not migrate:
        with engine.connect() as connection:
            present = sa.inspect(connection).get_table_names()
            stamped = _versions.name in present
            version = connection.execute(sa.select(_versions.c.version_num)).scalar() if stamped else "of old"
        if version != HEAD:
            raise StoreUnavailable(
                f"the database {engine.url.render_as_string()} has tables {version}, this version of elastune reads "
                f"{HEAD}; start a scheduler of this version on it once"
            )
        return
    with _whole(engine) as connection:
        present = sa.inspect(connection).get_table_names()
        if "trials" not in present:
            metadata.create_all(connection)
            _stamp(connection, HEAD)
            return
        if "about" in present:
            version = connection.execute(sa.select(_about.c.schema_version)).scalar_one()
            _stamp(connection, f"{version:04d}")
            connection.execute(sa.text("DROP TABLE about"))
        found = connection.execute(sa.select(_versions.c.version_num)).scalar_one()
        if found == HEAD:
            return
        if found not in {f"{number:04d}" for number in range(1, int(HEAD))}:
            raise StoreUnavailable(
                f"the database {engine.url.render_as_string()} has tables of version {found}, this version of elastune "
                f"knows those up to {HEAD}; use the version that made it, or another state folder"
            )
        _upgrade(connection)


def _stamp(connection: Connection, version: str) -> None:
    _versions.create(connection)
    connection.execute(_versions.insert().values(version_num=version))


def _upgrade(connection: Connection) -> None:
    from alembic import command
    from alembic.config import Config

    config = Config()
    config.set_main_option("script_location", str(Path(__file__).parent / "migrations"))
    config.attributes["connection"] = connection
    command.upgrade(config, HEAD)


@contextmanager
def _whole(engine: Engine) -> Iterator[Connection]:
    """A transaction around everything. SQLite's driver opens none before changes of tables unless it is told to."""
    if engine.dialect.name != "sqlite":
        with engine.begin() as connection:
            yield connection
        return
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        connection.exec_driver_sql("BEGIN IMMEDIATE")
        try:
            yield connection
        except BaseException:
            if not connection.invalidated:
                connection.exec_driver_sql("ROLLBACK")
            raise
        connection.exec_driver_sql("COMMIT")
