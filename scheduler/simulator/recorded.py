"""What a scheduler has recorded as a workload: what would another policy, or two more nodes, have done?

Each trial comes when it came, and does as much work as it did; how fast it is at other sizes says its study's profile,
and how noisy its gradients were at which part of its length what its study has measured.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from dist_core.goodput import Hints
from scheduler.profile import noise_bin, pool
from scheduler.simulator.application import ModelledApplication
from scheduler.simulator.errors import InvalidWorkload
from scheduler.simulator.workload import Submission
from trials.record import TrialRecord
from trials.store import SqlTrialStore

DATABASE = "trials.db"


@dataclass(frozen=True, slots=True)
class Recorded:
    submissions: list[Submission]
    skipped: int
    """Trials that measured nothing, such as those that failed at once."""


@dataclass(slots=True)
class _StudyRecord:
    trials: list[tuple[TrialRecord, Hints]] = field(default_factory=list)

    def noise(self) -> tuple[float, float]:
        """At the beginning and at the end of a trial's length."""
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
    """Of the scheduler that ran, or runs, on this folder; raises InvalidWorkload where nothing was recorded."""
    path = state_dir / DATABASE
    if not path.is_file():
        raise InvalidWorkload(f"{state_dir} holds no {DATABASE}; name the state folder of a scheduler that has run")
    store = SqlTrialStore(f"sqlite:///{path}", migrate=False)
    try:
        trials = store.trials()
        documents = store.hints([trial.trial_id for trial in trials])
    finally:
        store.close()
    studies: dict[str, _StudyRecord] = {}
    for trial in trials:
        if trial.trial_id not in documents:
            continue
        hints = Hints.from_json(documents[trial.trial_id])
        if hints.observations and hints.progress > 0:
            studies.setdefault(trial.spec.study, _StudyRecord()).trials.append((trial, hints))
    if not studies:
        raise InvalidWorkload(f"no trial of {path} has measured anything; there is nothing to simulate")
    first = min(trial.submitted_at for record in studies.values() for trial, _ in record.trials)
    submissions = [
        submission for name, record in studies.items() for submission in _submissions(name, record, first).values()
    ]
    submissions.sort(key=lambda submission: (submission.at, submission.name))
    return Recorded(submissions, len(trials) - len(submissions))


def _submissions(study: str, record: _StudyRecord, first: float) -> Mapping[str, Submission]:
    rows = {trial.trial_id: hints.observations for trial, hints in record.trials}
    kind = Counter(row.configuration.kind for each in rows.values() for row in each).most_common(1)[0][0]
    made = pool({name: [row for row in each if row.configuration.kind == kind] for name, each in rows.items()})
    assert made is not None
    profile, factors = made
    noise = record.noise()
    found = {}
    for trial, hints in record.trials:
        steps = hints.progress / hints.bounds.init_batch
        epochs = max(1, hints.epoch)
        factor = factors.get(trial.trial_id, profile.typical_factor)
        found[trial.trial_id] = Submission(
            name=f"{study}/{trial.spec.number}",
            at=trial.submitted_at - first,
            application=ModelledApplication(
                name=study,
                bounds=hints.bounds,
                params=profile.params.slower(factor),
                epochs=epochs,
                steps_per_epoch=steps / epochs,
                first_noise=noise[0],
                last_noise=noise[1],
            ),
            num_replicas=trial.spec.min_replicas,
            batch_size=hints.bounds.init_batch,
            max_replicas=trial.spec.max_replicas,
        )
    return found
