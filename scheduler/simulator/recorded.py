"""Workload from a scheduler's record: what would another policy, or two more nodes, have done?

Each trial does as much work as it did and reports what it reported; how fast it is at other sizes says its study's
profile, and how noisy its gradients were at which part of its length what its study has measured. A trial that was
submitted because others of its study had ended follows their ends; any other comes when it came.
"""

from __future__ import annotations

import math
import statistics
from bisect import bisect_right, insort
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from dist_core.goodput import Hints
from scheduler.knowledge.coming import Plans
from scheduler.knowledge.profile import noise_bin, pool
from scheduler.simulator.application import InvalidWorkload, ModelledApplication
from scheduler.simulator.as_it_ran import AsItRan, RanTrial, as_it_ran, entered
from scheduler.simulator.cluster import SimulationSettings
from scheduler.simulator.replicas import Timing
from scheduler.simulator.workload import Submission
from scheduler.simulator.world import World
from scheduler.snapshot import Policy
from scheduler.state_folder import DATABASE
from trials.record import Outcome, ReplicaRecord, Report, Study, TrialRecord
from trials.states import TrialState
from trials.store import SqlBacking

SUCCESSOR_SECONDS = 5.0
"""Longest gap after the end of a trial in which the next submission counts as its successor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedTrial:
    trial_id: str
    submission: Submission
    application: ModelledApplication
    """Its submission's."""
    study: str
    after_ends: int = 0
    """It is submitted when so many trials of its study have ended; 0: when it came."""
    gap_seconds: float = 0.0
    """Seconds from that end to its submission."""
    reports: tuple[Report, ...] = ()
    outcome: Outcome
    """Outcome once its work is done."""
    finished_at: float | None = None
    """Time of its real end, in seconds from the first submission; None if it was still running."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    trials: tuple[RecordedTrial, ...]
    studies: Mapping[str, Study]
    skipped: int
    """Trials that measured nothing, such as those that failed at once."""
    timing: Timing
    pause_seconds: float
    """Typical, of a change of size."""
    ran: AsItRan
    """Course of events on the scheduler's slots."""

    @property
    def submissions(self) -> list[Submission]:
        return [trial.submission for trial in self.trials]


@dataclass(slots=True)
class _StudyRecord:
    trials: list[tuple[TrialRecord, Hints]] = field(default_factory=list)
    reports: dict[str, list[Report]] = field(default_factory=dict)
    """Reports by trial."""

    def noise(self) -> tuple[float, float]:
        """Return the noise at the beginning and at the end of a trial's length."""
        by_bin: dict[int, list[float]] = {}
        for _, hints in self.trials:
            if hints.statistics is not None and hints.statistics.sqr > 0 and hints.target_progress:
                part = noise_bin(hints.progress / hints.target_progress)
                by_bin.setdefault(part, []).append(hints.statistics.var / hints.statistics.sqr)
        if not by_bin:
            return 1e-6, 1e-6
        first, last = (max(1e-6, statistics.median(by_bin[part])) for part in (min(by_bin), max(by_bin)))
        return first, last


def read_recorded(state_dir: Path) -> Recorded:
    """Read the record of the scheduler on this folder; raises InvalidWorkload where nothing was recorded."""
    path = state_dir / DATABASE
    if not path.is_file():
        raise InvalidWorkload(f"{state_dir} holds no {DATABASE}; name the state folder of a scheduler that has run")
    store = SqlBacking(f"sqlite:///{path}")
    try:
        recording = _read(store)
    finally:
        store.close()
    if recording is None:
        raise InvalidWorkload(f"no trial of {path} has measured the time of its steps; there is nothing to simulate")
    return recording


def _read(store: SqlBacking) -> Recorded | None:
    trials = store.trials()
    documents = store.hints([trial.trial_id for trial in trials])
    studies: dict[str, _StudyRecord] = {}
    for trial in trials:
        if trial.trial_id not in documents:
            continue
        hints = Hints.from_json(documents[trial.trial_id])
        if hints.bounds is not None and hints.observations and hints.progress > 0:
            studies.setdefault(trial.spec.study, _StudyRecord()).trials.append((trial, hints))
    if not studies:
        return None
    for name, record in studies.items():
        for report in store.reports(name):
            record.reports.setdefault(report.trial_id, []).append(report)
    replicas = store.replicas(live_only=False)
    first = min(trial.submitted_at for record in studies.values() for trial, _ in record.trials)
    # What came while the scheduler's machine imported what all replicas need could not have begun before.
    opened = min((replica.launched_at for replica in replicas), default=first)
    recorded_trials = [trial for name, record in studies.items() for trial in _trials(name, record, first, opened)]
    recorded_trials.sort(key=lambda trial: (trial.submission.at, trial.submission.name))
    pauses = [
        hints.rescale_pause_seconds
        for record in studies.values()
        for _, hints in record.trials
        if hints.rescale_pause_seconds is not None
    ]
    pause = statistics.median(pauses) if pauses else 0.0
    ran = _ran(store, trials, replicas, recorded_trials, pause)
    return Recorded(
        trials=tuple(recorded_trials),
        studies={study.name: study for study in store.studies() if study.name in studies},
        skipped=len(trials) - len(recorded_trials),
        timing=_timing(trials, replicas, recorded_trials, ran),
        pause_seconds=pause,
        ran=as_it_ran(ran, _last_seen(trials, replicas)),
    )


def _last_seen(trials: Sequence[TrialRecord], replicas: Sequence[ReplicaRecord]) -> float:
    """Return when something last happened: the end, if the scheduler does not run any more."""
    moments = [trial.finished_at or trial.submitted_at for trial in trials]
    moments += [replica.gone_at or replica.ready_at or replica.launched_at for replica in replicas]
    return max(moments)


def _ran(
    store: SqlBacking,
    trials: Sequence[TrialRecord],
    replicas: Sequence[ReplicaRecord],
    recorded: Sequence[RecordedTrial],
    pause_seconds: float,
) -> list[RanTrial]:
    by_trial: dict[str, list[ReplicaRecord]] = {}
    for replica in replicas:
        by_trial.setdefault(replica.trial_id, []).append(replica)
    records = {trial.trial_id: trial for trial in trials}
    return [
        RanTrial(
            name=trial.submission.name,
            record=records[trial.trial_id],
            application=trial.application,
            history=store.history(trial.trial_id),
            replicas=by_trial.get(trial.trial_id, ()),
            pause_seconds=pause_seconds,
        )
        for trial in recorded
    ]


def _timing(
    trials: Iterable[TrialRecord],
    replicas: Iterable[ReplicaRecord],
    recorded: Iterable[RecordedTrial],
    ran: Iterable[RanTrial],
) -> Timing:
    ended = {trial.trial_id: trial.finished_at for trial in trials}
    starts, leaves = [], []
    for replica in replicas:
        if replica.ready_at is not None:
            starts.append(replica.ready_at - replica.launched_at)
        end = ended.get(replica.trial_id)
        if replica.gone_at is not None and end is not None and replica.gone_at >= end:
            leaves.append(replica.gone_at - end)
    gaps = [trial.gap_seconds for trial in recorded if trial.after_ends]
    enters = [since - ready for trial in ran for ready, since in entered(trial)]
    seen = {"start": starts, "enter": enters, "leave": leaves, "successor": gaps}
    return Timing(**{name: max(0.0, statistics.median(seconds)) for name, seconds in seen.items() if seconds})


def _trials(study: str, record: _StudyRecord, first: float, opened: float) -> list[RecordedTrial]:
    # One that has had several layouts is simulated with its last.
    rows = {
        trial.trial_id: [row for row in hints.observations if row.configuration.layout == hints.layout]
        for trial, hints in record.trials
    }
    kind = Counter(row.configuration.kind for each in rows.values() for row in each).most_common(1)[0][0]
    made = pool({name: [row for row in each if row.configuration.kind == kind] for name, each in rows.items()})
    assert made is not None
    profile, factors = made
    noise = record.noise()
    ends = sorted(trial.finished_at for trial, _ in record.trials if trial.finished_at is not None)
    recorded_trials = []
    for trial, hints in record.trials:
        assert hints.bounds is not None
        reports = sorted(record.reports.get(trial.trial_id, ()), key=lambda report: report.progress)
        # What it says of itself in passing may be half a second old when it ends.
        done = max(hints.progress, *(report.progress for report in reports), 0.0)
        steps, epochs = done / hints.bounds.init_batch, _epochs_in(done, hints)
        part = 1.0 if not hints.target_progress else min(1.0, done / hints.target_progress)
        factor = factors.get(trial.trial_id, profile.typical_factor)
        after, gap = _predecessor(trial.submitted_at, ends)
        application = ModelledApplication(
            name=study,
            bounds=hints.bounds,
            params=profile.params.slower(factor),
            epochs=epochs,
            steps_per_epoch=steps / epochs,
            first_noise=noise[0],
            last_noise=noise[0] * (noise[1] / noise[0]) ** part,
        )
        recorded_trials.append(
            RecordedTrial(
                trial_id=trial.trial_id,
                application=application,
                submission=Submission(
                    name=f"{study}/{trial.spec.number}",
                    at=max(trial.submitted_at, opened) - first,
                    application=application,
                    num_replicas=trial.spec.min_replicas,
                    batch_size=hints.bounds.init_batch,
                    max_replicas=trial.spec.max_replicas,
                    declared_progress=hints.target_progress,
                    slots_per_replica=trial.slots_per_replica,
                    slots_per_share=hints.slots_per_share,
                ),
                study=study,
                after_ends=after,
                gap_seconds=gap,
                reports=tuple(reports),
                outcome=_outcome(trial),
                finished_at=None if trial.finished_at is None else trial.finished_at - first,
            )
        )
    return recorded_trials


def _epochs_in(progress: float, hints: Hints) -> int:
    """Return how many epochs this progress makes up; at least 1."""
    return max(1, round((hints.epoch + hints.epoch_fraction) * progress / hints.progress))


def _predecessor(submitted_at: float, ends: Sequence[float]) -> tuple[int, float]:
    """Return (ends of the study before this submission, seconds since the latest); (0, 0) if that was long ago."""
    before = bisect_right(ends, submitted_at)
    if not before or submitted_at - ends[before - 1] > SUCCESSOR_SECONDS:
        return 0, 0.0
    return before, submitted_at - ends[before - 1]


def _outcome(trial: TrialRecord) -> Outcome:
    if trial.outcome is not None:
        return trial.outcome
    if trial.state is TrialState.PRUNED:
        return Outcome(kind="pruned")
    return Outcome(kind="value")


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
