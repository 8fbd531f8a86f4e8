"""Usage: the slot seconds that trials and studies have had, and for how long each trial was served."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from trials.record import ReplicaRecord
from trials.store import TrialStore


class Usage:
    def __init__(self, store: TrialStore) -> None:
        self._store = store
        self._of_trial: dict[str, float] = {}
        self._of_study: dict[str, float] = {}
        self._served: dict[str, float] = {}
        self._held: dict[str, tuple[str, int]] = {}
        self._looked_at: float | None = None

    def of_trial(self, trial_id: str) -> float:
        return self._of_trial.get(trial_id, 0.0)

    def of_study(self, study: str) -> float:
        return self._of_study.get(study, 0.0)

    def served_seconds(self, trial_id: str) -> float:
        """Return the seconds for which the trial has had any slot."""
        return self._served.get(trial_id, 0.0)

    def look(self, replicas_of: Mapping[str, Sequence[ReplicaRecord]], study_of: Mapping[str, str], now: float) -> None:
        """Add up what trials and studies have held since the last look; the first one reads the store's account."""
        if self._looked_at is None:
            study_of = {trial.trial_id: trial.spec.study for trial in self._store.trials()}
            served_until: dict[str, float] = {}
            for interval in sorted(self._store.slot_intervals(), key=lambda interval: interval.began):
                trial_id, ended = interval.trial_id, now if interval.ended is None else interval.ended
                self._add(trial_id, study_of[trial_id], max(0.0, ended - interval.began))
                new = max(0.0, ended - max(interval.began, served_until.get(trial_id, 0.0)))
                self._served[trial_id] = self._served.get(trial_id, 0.0) + new
                served_until[trial_id] = max(ended, served_until.get(trial_id, 0.0))
        else:
            for trial_id, (study, slots) in self._held.items():
                self._add(trial_id, study, slots * (now - self._looked_at))
                self._served[trial_id] = self._served.get(trial_id, 0.0) + now - self._looked_at
        self._held = {name: (study_of[name], len(rows)) for name, rows in replicas_of.items() if name in study_of}
        self._looked_at = now

    def _add(self, trial_id: str, study: str, seconds: float) -> None:
        self._of_trial[trial_id] = self._of_trial.get(trial_id, 0.0) + seconds
        self._of_study[study] = self._of_study.get(study, 0.0) + seconds

    def forget(self, trial_id: str) -> None:
        self._of_trial.pop(trial_id, None)
        self._served.pop(trial_id, None)

    def forget_study(self, study: str) -> None:
        self._of_study.pop(study, None)
