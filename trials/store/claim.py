"""One scheduler for a database server's database: a lock that PostgreSQL lets go of with its owner's connection."""

from __future__ import annotations

import os
import socket

import sqlalchemy as sa
from sqlalchemy.engine import Connection, Engine

from trials.errors import StateFolderInUse

_KEY = 0x656C6173
"""Number of the advisory lock: any, but always the same."""
LONGEST_NAME = 63


def whoami() -> str:
    """How a scheduler is named among the server's clients."""
    return f"elastune pid {os.getpid()} on {socket.gethostname()}"[:LONGEST_NAME]


def claim(engine: Engine) -> Connection:
    """The connection that holds the lock, to be kept open; raises StateFolderInUse with its holder's name."""
    connection = engine.connect().execution_options(isolation_level="AUTOCOMMIT")
    if connection.execute(sa.select(sa.func.pg_try_advisory_lock(_KEY))).scalar_one():
        return connection
    holder = connection.execute(
        sa.text(
            "SELECT application_name FROM pg_stat_activity JOIN pg_locks USING (pid) "
            "WHERE locktype = 'advisory' AND objid = :key AND granted AND pg_locks.database = "
            "(SELECT oid FROM pg_database WHERE datname = current_database())"
        ),
        {"key": _KEY},
    ).scalar()
    connection.close()
    raise StateFolderInUse(
        f"the database {engine.url.render_as_string()} belongs to a running scheduler ({holder or 'unknown'}); set "
        "ELASTUNE_URL to use it, stop it, or choose another database"
    )
