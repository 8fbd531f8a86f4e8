"""Errors that a user of the scheduler can run into, split by what to do next.

SchedulerError
├── SchedulerUnreachable   nobody answers at the address: start one, or correct ELASTUNE_URL
├── NotAuthorized          the token is wrong or missing: set ELASTUNE_TOKEN
├── RequestRefused         the scheduler understood and said no: the message tells why
├── NotRunning             the folder's scheduler has ended: what it has kept can be looked at
└── SchedulerDidNotStart   the embedded scheduler ended before it answered: its log tells why
"""

from __future__ import annotations

from pathlib import Path


class SchedulerError(Exception):
    """Base of everything that the scheduler's front side raises on purpose."""


class SchedulerUnreachable(SchedulerError):
    """No answer from the address."""


class NotAuthorized(SchedulerError):
    """The scheduler does not accept the token."""


class RequestRefused(SchedulerError):
    """A request that cannot be carried out as it is."""


class NotRunning(SchedulerError):
    """A state folder whose scheduler has ended."""

    def __init__(self, message: str, folder: Path) -> None:
        super().__init__(message)
        self.folder = folder


class SchedulerDidNotStart(SchedulerError):
    """The scheduler process ended, or did not come up in time."""
