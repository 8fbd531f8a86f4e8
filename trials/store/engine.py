"""The connection to a database: SQLite's file, or a server."""

from __future__ import annotations

import re
from typing import Any

import sqlalchemy as sa
from sqlalchemy import event
from sqlalchemy.engine import Engine

from trials.errors import StoreUnavailable
from trials.store.claim import whoami

BUSY_SECONDS = 10
"""Longest wait for another writer, or for a connection, before a write is given up as impossible for now."""


def _without_password(url: str) -> str:
    return re.sub(r"(?<=:)[^:@/]+(?=@)", "***", url)


def engine_for(url: str) -> Engine:
    if not url.startswith("sqlite"):
        try:
            return sa.create_engine(
                url, pool_pre_ping=True, pool_size=10, max_overflow=40, connect_args={"application_name": whoami()}
            )
        except (ModuleNotFoundError, sa.exc.NoSuchModuleError, sa.exc.ArgumentError, TypeError) as error:
            raise StoreUnavailable(
                f"the database {_without_password(url)} cannot be used: {error}; give "
                "postgresql+psycopg://USER@HOST/NAME and `pip install elastune[postgresql]`, or leave it out for a "
                "file in the state folder"
            ) from error
    options: dict[str, Any] = {"connect_args": {"timeout": BUSY_SECONDS, "check_same_thread": False}}
    if url in ("sqlite://", "sqlite:///:memory:"):
        options["poolclass"] = sa.pool.StaticPool
    else:
        options |= {"pool_size": 10, "max_overflow": 40, "pool_timeout": BUSY_SECONDS}
    engine = sa.create_engine(url, **options)

    @event.listens_for(engine, "connect")
    def _prepare(connection: Any, _: Any) -> None:
        cursor = connection.cursor()
        cursor.execute("PRAGMA journal_mode=WAL")
        cursor.execute("PRAGMA synchronous=FULL")
        # Keeps the log near 1 MB: on a disk that is almost full a large one would be what fills it.
        cursor.execute("PRAGMA wal_autocheckpoint=250")
        cursor.close()

    return engine
