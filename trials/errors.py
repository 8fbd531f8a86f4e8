"""Errors of trials, split by what the caller does next.

TrialsError
├── InvalidTrialSpec       the submission is contradictory: fix the input
├── InvalidStudyTerms      what is asked for a study means nothing: fix the input
├── UnknownTrial           no trial or study of that name: look it up
├── IllegalTransition      our bug: an event that the trial's state does not allow
├── StoreUnavailable       the database cannot be written (a full disk): retry later
├── StateFolderInUse       another scheduler owns the folder: use that one, or stop it
├── InvalidClusterSettings what is said of the cluster means nothing: fix the input
├── ClusterRefused         the cluster's API server refuses something for good: the message says what
├── ClusterUnreachable     the cluster's API server does not answer, or none is known: retry later
├── SlurmRefused           Slurm refuses something for good: the message has its own words
├── SlurmUnreachable       Slurm's controller does not answer: retry later
└── LaunchFailed           a replica could not be started: the trial waits and is tried again
"""

from __future__ import annotations


class TrialsError(Exception):
    """Base of everything that trials raises on purpose."""


class InvalidTrialSpec(TrialsError, ValueError):
    """A trial cannot be run as described; the message says what to change."""


class InvalidStudyTerms(TrialsError, ValueError):
    """Weight, priority, quota or goal of a study cannot be used; the message says what to change."""


class UnknownTrial(TrialsError, KeyError):
    """Nothing is stored under this name."""

    def __str__(self) -> str:
        return str(self.args[0]) if self.args else "unknown trial"


class IllegalTransition(TrialsError):
    """The transition table has no row for this state and event."""


class StoreUnavailable(TrialsError):
    """The store did not take a write; what it held before is intact."""


class StateFolderInUse(TrialsError):
    """A running scheduler holds the folder's lock."""


class InvalidClusterSettings(TrialsError, ValueError):
    """The administrator's settings of the cluster cannot be used; the message says what to change."""


class ClusterRefused(TrialsError):
    """The API server answered with an HTTP status of the 400s.

    ``is_gone``: there is no object of that name. A 404 alone may come from an API server that does not serve the kind
    yet, or any more.
    """

    def __init__(self, message: str, *, status: int, is_gone: bool = False) -> None:
        super().__init__(message)
        self.status = status
        self.is_gone = is_gone


class ClusterUnreachable(StoreUnavailable):
    """Error of a request to the API server that may or may not have been carried out."""


class SlurmRefused(TrialsError):
    """One of Slurm's commands ended with an error; its own words are in the message."""


class SlurmUnreachable(TrialsError):
    """Error of a request to Slurm's controller that may or may not have been carried out."""


class LaunchFailed(TrialsError):
    """The launcher could not start a replica."""
