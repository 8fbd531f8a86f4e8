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
        self._last: dict[str, int] = {}
        """By trial its highest step."""

    def add(self, report: Report) -> None:
        """A step that was reported before keeps its first value."""
        if report.trial_id not in self._of:
            self._of[report.trial_id] = {}
            self._names = None
        if self._of[report.trial_id].setdefault(report.step, report) is report:
            self._sorted.pop(report.trial_id, None)
            self._last[report.trial_id] = max(report.step, self._last.get(report.trial_id, report.step))

    def has(self, trial_id: str, step: int) -> bool:
        return step in self._of.get(trial_id, ())

    def has_any(self, trial_id: str) -> bool:
        return bool(self._of.get(trial_id))

    def steps_of(self, trial_id: str) -> list[int]:
        return sorted(self._of.get(trial_id, ()))

    def of(self, trial_id: str) -> list[Report]:
        """In order of steps."""
        mine = self._sorted.get(trial_id)
        if mine is None:
            steps = self._of.get(trial_id, {})
            mine = [steps[step] for step in sorted(steps)]
            if trial_id in self._of:
                self._sorted[trial_id] = mine
        return mine

    def latest(self) -> dict[str, Report]:
        """By trial the one of the highest step."""
        return {name: steps[self._last[name]] for name, steps in self._of.items() if steps}

    def forget(self, trial_id: str, steps: Sequence[int]) -> None:
        mine = self._of.get(trial_id, {})
        for step in steps:
            mine.pop(step, None)
        self._sorted.pop(trial_id, None)
        if mine:
            self._last[trial_id] = max(mine)

    def forget_trial(self, trial_id: str) -> None:
        self._of.pop(trial_id, None)
        self._sorted.pop(trial_id, None)
        self._last.pop(trial_id, None)
        self._names = None

    def rows(self) -> list[Report]:
        """All, in order of trial and step."""
        if self._names is None:
            self._names = sorted(self._of)
        found: list[Report] = []
        for name in self._names:
            found += self.of(name)
        return found
