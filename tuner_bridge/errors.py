"""Errors of a sweep, split by what the caller does next.

BridgeError
├── InvalidSweep       optimize() was called with something it cannot run: the message says what to change
├── TrialLost          a trial's replicas were lost more often than its retry budget allows
├── InvalidValue       an objective set something on its trial that cannot travel: convert it
└── RemoteTrialError   an exception from a replica whose own type cannot be rebuilt here
"""

from __future__ import annotations


class BridgeError(Exception):
    """Base of everything that tuner_bridge raises on purpose."""


class InvalidSweep(BridgeError, ValueError):
    """The sweep cannot start as asked."""


class InvalidValue(BridgeError, TypeError):
    """A value that cannot be given to another process."""


class TrialLost(BridgeError, RuntimeError):
    """Infrastructure, not the objective, failed this trial for good."""


class RemoteTrialError(BridgeError, RuntimeError):
    """The objective raised in a replica; the message holds the original type and text."""


class SweepInterrupted(BaseException):
    """Unwinds Optuna's loop after Ctrl-C, or when the scheduler is lost, without telling it that the trial failed.

    The trial is to be resumed; ``catch`` must not take this for an exception of the objective.
    """
