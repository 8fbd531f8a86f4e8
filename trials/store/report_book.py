"""A study's reports in memory, by trial and step. Whoever asks again pays for what is new."""

from __future__ import annotations

from collections.abc import Sequence

from trials.record import Report


class ReportBook:
    def __init__(self) -> None:
        self._of: dict[str, dict[int, Report]] = {}
        self._sorted: dict[str, list[Report]] = {}
        """Of the trials that have reported nothing since they were asked for."""
        self._names: list[str] | None = None

    def add(self, report: Report) -> None:
        """A step that was reported before keeps its first value."""
        if report.trial_id not in self._of:
            self._of[report.trial_id] = {}
            self._names = None
        if self._of[report.trial_id].setdefault(report.step, report) is report:
            self._sorted.pop(report.trial_id, None)

    def has(self, trial_id: str, step: int) -> bool:
        return step in self._of.get(trial_id, ())

    def has_any(self, trial_id: str) -> bool:
        return bool(self._of.get(trial_id))

    def steps_of(self, trial_id: str) -> list[int]:
        return sorted(self._of.get(trial_id, ()))

    def forget(self, trial_id: str, steps: Sequence[int]) -> None:
        for step in steps:
            self._of.get(trial_id, {}).pop(step, None)
        self._sorted.pop(trial_id, None)

    def forget_trial(self, trial_id: str) -> None:
        self._of.pop(trial_id, None)
        self._sorted.pop(trial_id, None)
        self._names = None

    def rows(self) -> list[Report]:
        """All, in order of trial and step."""
        if self._names is None:
            self._names = sorted(self._of)
        found: list[Report] = []
        for name in self._names:
            mine = self._sorted.get(name)
            if mine is None:
                steps = self._of[name]
                mine = self._sorted[name] = [steps[step] for step in sorted(steps)]
            found += mine
        return found
