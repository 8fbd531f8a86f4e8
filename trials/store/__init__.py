"""Store of trials: their present state in memory, and a backing that keeps it (a SQL database, or none)."""

from trials.store.base import Backing
from trials.store.memory import TrialStore
from trials.store.sql import SqlBacking, sql_store

__all__ = ["Backing", "SqlBacking", "TrialStore", "sql_store"]
