"""Where trials are kept: one protocol, one SQL implementation (SQLite embedded; any SQLAlchemy database shared)."""

from trials.store.base import TrialStore
from trials.store.sql import SqlTrialStore

__all__ = ["SqlTrialStore", "TrialStore"]
