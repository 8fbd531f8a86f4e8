"""Where trials are kept: one protocol; SQL (SQLite embedded, any SQLAlchemy database shared) or memory."""

from trials.store.base import TrialStore
from trials.store.cached import CachedTrialStore
from trials.store.memory import InMemoryTrialStore
from trials.store.sql import SqlTrialStore

__all__ = ["CachedTrialStore", "InMemoryTrialStore", "SqlTrialStore", "TrialStore"]
