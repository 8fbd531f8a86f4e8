"""Recorded sweeps once more in virtual time: with their reports, their ends, and successors that follow these."""

from __future__ import annotations

import math
from bisect import insort
from dataclasses import replace

from scheduler.knowledge.coming import Plans
from scheduler.simulator.cluster import SimulationSettings
from scheduler.simulator.recorded import Recorded, RecordedTrial
from scheduler.simulator.workload import Submission
from scheduler.simulator.world import World
from scheduler.snapshot import Policy
from trials.record import Outcome, Report, Study

_NEAR = 0.01
"""Part of a step at the initial batch size by which a report may be early: progress is a sum of many steps."""


class RecordedWorld(World):
    def __init__(self, recorded: Recorded, policy: Policy, settings: SimulationSettings) -> None:
        super().__init__(recorded.submissions, policy, settings)
        self._recorded = {trial.submission.name: trial for trial in recorded.trials}
        self._ends: dict[str, list[float]] = {trial.study: [] for trial in recorded.trials}
        self._reported: dict[str, int] = {}
        for trial in recorded.trials:
            known = recorded.studies.get(trial.study, Study(name=trial.study))
            self._put_study(replace(known, name=self._study_of(trial.submission)))

    def _due(self, submission: Submission) -> float:
        """Return when it is submitted, as far as can be told now."""
        trial = self._recorded[submission.name]
        ends = self._ends[trial.study]
        if not trial.after_ends:
            return submission.at
        return ends[trial.after_ends - 1] + trial.gap_seconds if len(ends) >= trial.after_ends else math.inf

    def _next_submission(self) -> float:
        return min(map(self._due, self._waiting), default=math.inf)

    def _submit_due(self) -> None:
        due = [submission for submission in self._waiting if self._due(submission) <= self.now]
        for submission in due:
            at = self._due(submission)
            self._waiting.remove(submission)
            self._submit(replace(submission, at=at))
        for study in {self._recorded[submission.name].study for submission in due}:
            self._tell_plans(study)

    def _tell_plans(self, study: str) -> None:
        """Tell plans as the study's driver did: it keeps as many submitted as come before the first end."""
        trials = [trial for trial in self._recorded.values() if trial.study == study]
        left = sum(self._recorded[submission.name].study == study for submission in self._waiting)
        self.loop.decisions.note_plans(study, Plans(sum(not trial.after_ends for trial in trials), left))

    def _note_progress(self) -> None:
        for trial_id, training in list(self.trainings.items()):
            trial = self._recorded[training.submission.name]
            is_over = training.finished_at is not None
            so_far = (training.progress + _NEAR) * training.application.bounds.init_batch
            self._report(trial_id, trial, math.inf if is_over else so_far)
            if training.finished_at is not None:
                self._end(trial_id, trial.outcome, training.finished_at)

    def _report(self, trial_id: str, trial: RecordedTrial, progress: float) -> None:
        """Report what the trial had reported when it had come so far."""
        seen = self._reported.get(trial_id, 0)
        for report in trial.reports[seen:]:
            if report.progress > progress:
                break
            self.store.add_report(Report(trial_id, report.step, report.value, report.progress))
            seen += 1
        self._reported[trial_id] = seen

    def _end(self, trial_id: str, outcome: Outcome, at: float) -> None:
        study = self._recorded[self.trainings[trial_id].submission.name].study
        super()._end(trial_id, outcome, at)
        insort(self._ends[study], at)
