"""The scheduler as Python objects, for programs, the command line and tuner bridges: ``Client`` and what it returns."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dist_core.hooks import loaded_on_use

if TYPE_CHECKING:
    from scheduler.client.client import Client
    from scheduler.client.connection import SchedulerClient
    from scheduler.client.rows import Entry, Node, Study, Trial, UsedHours

_HOME = {
    "Client": ".client",
    "Entry": ".rows",
    "Node": ".rows",
    "SchedulerClient": ".connection",
    "Study": ".rows",
    "Trial": ".rows",
    "UsedHours": ".rows",
}

__all__ = ["Client", "Entry", "Node", "SchedulerClient", "Study", "Trial", "UsedHours"]


# The command line asks for where things are before it connects to anything.
__getattr__ = loaded_on_use(__name__, _HOME)
