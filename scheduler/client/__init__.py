"""The scheduler as Python objects, for programs, the command line and tuner bridges: ``Client`` and what it returns."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from scheduler.client.client import Client
    from scheduler.client.connection import SchedulerClient
    from scheduler.client.rows import Entry, Node, Study, Trial, UsedHours

_HOME = {
    "Client": "client",
    "Entry": "rows",
    "Node": "rows",
    "SchedulerClient": "connection",
    "Study": "rows",
    "Trial": "rows",
    "UsedHours": "rows",
}

__all__ = ["Client", "Entry", "Node", "SchedulerClient", "Study", "Trial", "UsedHours"]


def __getattr__(name: str) -> Any:
    """Load a name on use: the command line asks for where things are before it connects to anything."""
    if name not in _HOME:
        raise AttributeError(f"module 'scheduler.client' has no attribute {name!r}")
    return getattr(import_module(f"scheduler.client.{_HOME[name]}"), name)
