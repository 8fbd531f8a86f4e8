"""Runs of an experiment's trials with its trackers; those of an experiment that resumes go on."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from scheduler.errors import SchedulerError
from scheduler.state_folder import write_durably
from tuner_bridge.nni.plain_json import number_in
from tuner_bridge.trackers.base import Tracker
from tuner_bridge.trackers.tracked_trial import TrackedTrial

logger = logging.getLogger(__name__)

KEPT = "tracked.json"
_STATES = {"succeeded": "complete", "cancelled": "pruned"}


class TrackedResults:
    """One trial's: its results as NNI takes them. ``folder``: NNI's of this trial."""

    def __init__(self, trackers: Sequence[Tracker], title: str, study_key: str, number: int, folder: Path) -> None:
        path = folder / KEPT
        kept: dict[str, str] = json.loads(path.read_text()) if path.exists() else {}
        self._trial = TrackedTrial(trackers, title, study_key, number, kept)
        self._final: float | None = None
        if self._trial.identities != kept:
            try:
                folder.mkdir(parents=True, exist_ok=True)
                write_durably(path, json.dumps(self._trial.identities))
            except (OSError, SchedulerError) as error:
                logger.warning("an experiment that resumes begins new runs of trial %d: %s", number, error)

    @property
    def environ(self) -> dict[str, str]:
        return self._trial.environ

    def parameters(self, chosen: Mapping[str, Any]) -> None:
        for name, value in chosen.items():
            self._trial.parameter(name, value)

    def took(self, metric: Mapping[str, Any]) -> None:
        value = metric.get("value")
        number = number_in(json.loads(value)) if isinstance(value, str) else None
        if number is None:
            return
        if metric["type"] == "PERIODICAL":
            self._trial.report(number, metric["sequence"])
        else:
            self._final = number

    def live(self, known: Mapping[str, Any]) -> None:
        self._trial.live(known)

    def leave(self) -> None:
        self._trial.leave()

    def end(self, state: str, history: Sequence[str]) -> None:
        """``state``: the scheduler's word for how it ended."""
        self._trial.end(_STATES.get(state, "fail"), None if self._final is None else [self._final], history)
