"""TrackedTrial: one trial's runs with all trackers. One that fails is left out of the rest; no trial ends by it."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from tuner_bridge.errors import InvalidSweep
from tuner_bridge.trackers.base import TrackedRun, Tracker, TrialIdentity

logger = logging.getLogger(__name__)

ATTRIBUTE = "elastune:tracked"
MEASURED = {"replicas": "replicas", "goodput": "goodput", "batch": "batch_size"}
"""Fields that the scheduler reports of a running trial, and the names that they are tracked under."""


class TrackedTrial:
    """The runs of one trial with all trackers.

    ``kept``: identities of its runs in an interrupted sweep, by their trackers' names.
    """

    def __init__(
        self, trackers: Iterable[Tracker], study: str, study_key: str, number: int, kept: Mapping[str, str]
    ) -> None:
        self._runs: list[tuple[str, TrackedRun]] = []
        self._began = time.monotonic()
        self._measured: dict[str, float] = {}
        for tracker in trackers:
            trial = TrialIdentity(study=study, study_key=study_key, number=number, kept=kept.get(tracker.name))
            try:
                self._runs.append((tracker.name, tracker.begin(trial)))
            except InvalidSweep:
                raise
            except Exception as error:
                _say_left_out(tracker.name, number, error)
        self._number = number

    @property
    def identities(self) -> dict[str, str]:
        return {name: run.identity for name, run in self._runs}

    @property
    def environ(self) -> dict[str, str]:
        return {name: value for _, run in self._runs for name, value in run.environ.items()}

    def parameter(self, name: str, value: Any) -> None:
        self._tell(lambda run: run.parameter(name, value))

    def report(self, value: float, step: int) -> None:
        if math.isfinite(value):
            self._tell(lambda run: run.report(value, step))

    def live(self, known: Mapping[str, Any]) -> None:
        """Track what the scheduler says of the trial; what is as before is not said again."""
        now = {shown: float(known[name]) for name, shown in MEASURED.items() if known.get(name)}
        news = {name: value for name, value in now.items() if self._measured.get(name) != value}
        if news:
            self._measured.update(news)
            seconds = time.monotonic() - self._began
            self._tell(lambda run: run.measure(news, seconds))

    def leave(self) -> None:
        """Leave: the sweep is interrupted."""
        self._tell(lambda run: run.leave())

    def end(self, state: str, values: Sequence[float] | None, history: Sequence[str]) -> None:
        self._tell(lambda run: run.end(state, values, history))

    def _tell(self, what: Callable[[TrackedRun], None]) -> None:
        for name, run in list(self._runs):
            try:
                what(run)
            except Exception as error:
                self._runs.remove((name, run))
                _say_left_out(name, self._number, error)


def _say_left_out(name: str, number: int, error: Exception) -> None:
    logger.warning("trial %d is no longer tracked by %s: %s: %s", number, name, type(error).__name__, error)
