"""Events of a trial, as a tracker hears them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Protocol

from tuner_bridge.errors import InvalidSweep

REPORTED = "objective"
"""The name under which values that the objective reports are tracked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialIdentity:
    study: str
    """Name of the study for people."""
    study_key: str
    """Its name among all studies of a scheduler."""
    number: int
    kept: str | None
    """Identity of the trial's run when the sweep was interrupted; None for a new trial."""

    @property
    def name(self) -> str:
        return f"{self.study}-{self.number:04d}"


class TrackedRun(Protocol):
    """One trial's run in a tracker, whose methods are called from the thread that serves the trial."""

    identity: str
    """Identity by which a resumed sweep finds it again."""
    environ: Mapping[str, str]
    """Variables for the trial's replicas, whose own logging then goes to this run."""

    def parameter(self, name: str, value: Any) -> None: ...

    def report(self, value: float, step: int) -> None: ...

    def measure(self, numbers: Mapping[str, float], seconds: float) -> None:
        """Track how the trial runs, when that has changed: replicas, goodput, batch; ``seconds`` since it began."""
        ...

    def leave(self) -> None:
        """Leave: the sweep is interrupted, and may go on; write what is known."""
        ...

    def end(self, state: str, values: Sequence[float] | None, history: Sequence[str]) -> None:
        """End the run. ``state``: complete, pruned or fail; ``history``: a line for each thing that happened to it."""
        ...


class Tracker(Protocol):
    name: str

    def begin(self, trial: TrialIdentity) -> TrackedRun:
        """Begin a trial's run; raise InvalidSweep for what is missing here."""
        ...


def imported(module: str, distribution: str, whose: str) -> Any:
    """Import a tracker's module; raise InvalidSweep if it is not installed."""
    try:
        return import_module(module)
    except ImportError as error:
        raise InvalidSweep(
            f"{whose} needs the package {distribution}, which cannot be imported ({error}); install it, or "
            "'elastune[trackers]'"
        ) from error
