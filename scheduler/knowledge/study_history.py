"""What the trials of one study have measured so far, live and ended ones, and the profiles that it makes."""

from __future__ import annotations

import statistics

from dist_core.goodput import BatchBounds, Configuration, Hints, Observation
from scheduler.knowledge.profile import StudyProfile, TrialModel, noise_at, noise_bin, pool
from scheduler.knowledge.survival import Survival

REFIT_SECONDS = 2.0
"""Least time between two fits of one study."""
SURPRISE = 0.03
"""Mean distance in log units between measured and believed step times from which on the profile is made anew."""
GROWTH = 1.15
"""So is it when there are that many times as many configurations as it was made from."""


class StudyHistory:
    def __init__(self) -> None:
        self._measured: dict[str, _OnOneKind] = {}
        self._noise: dict[int, dict[str, float]] = {}
        self._targets: dict[str, float] = {}
        self._progress: dict[str, float] = {}
        self._stopped: set[str] = set()
        self._bounds: BatchBounds | None = None
        self._slots_per_share = 1

    def note(self, trial_id: str, hints: Hints) -> None:
        """What a trial has said now takes the place of what it said before."""
        by_kind: dict[str, list[Observation]] = {}
        for row in hints.observations:
            by_kind.setdefault(row.configuration.kind, []).append(row)
        for kind, rows in by_kind.items():
            self._measured.setdefault(kind, _OnOneKind()).note(trial_id, tuple(rows))
        self._bounds = hints.bounds
        self._slots_per_share = hints.slots_per_share
        self._progress[trial_id] = hints.progress
        if hints.target_progress:
            self._targets[trial_id] = hints.target_progress
            if hints.statistics is not None and hints.statistics.sqr > 0:
                fraction = hints.progress / hints.target_progress
                ratio = hints.statistics.var / hints.statistics.sqr
                self._noise.setdefault(noise_bin(fraction), {})[trial_id] = ratio

    def note_end(self, trial_id: str, *, stopped: bool) -> None:
        """The trial is over: stopped by its tuner, or trained to its end."""
        if stopped:
            self._stopped.add(trial_id)

    def fraction(self, trial_id: str) -> float:
        """Part of the declared length that the trial is known to have done."""
        target = self._targets.get(trial_id)
        return min(1.0, self._progress.get(trial_id, 0.0) / target) if target else 0.0

    @property
    def survival(self) -> Survival:
        stopped = [self.fraction(name) for name in self._stopped]
        return Survival.of(stopped, [self.fraction(name) for name in self._progress if name not in self._stopped])

    def refresh(self, now: float) -> None:
        """Make profiles anew when what was measured since is more, or other, than they explain."""
        for measured in self._measured.values():
            measured.refresh(now)

    @property
    def typical_target(self) -> float | None:
        """Declared length of the study's trials, for one that has not said its own; None when none has."""
        return statistics.median(self._targets.values()) if self._targets else None

    def _noise_history(self) -> dict[int, float]:
        return {index: statistics.median(values.values()) for index, values in self._noise.items()}

    def model(self, trial_id: str, hints: Hints | None) -> TrialModel | None:
        """The trial's model, on the kind of nodes that most is known of; None before anybody has measured anything."""
        known = [kind for kind, measured in self._measured.items() if measured.profile is not None]
        if not known:
            return None
        kind = max(known, key=lambda kind: (self._measured[kind].num_configurations, kind))
        bounds = self._bounds if hints is None else hints.bounds
        assert bounds is not None
        profile, factor = self._measured[kind].profile_of(trial_id)
        return TrialModel(
            profile=profile,
            bounds=bounds,
            noise=self._noise_of(hints),
            factor=factor,
            kind=kind,
            elsewhere={other: self._measured[other].profile_of(trial_id) for other in known if other != kind},
            slots_per_share=self._slots_per_share if hints is None else hints.slots_per_share,
        )

    def _noise_of(self, hints: Hints | None) -> float:
        """As the trial has measured it, else as others have at the same part of their length."""
        if hints is not None and hints.statistics is not None and hints.statistics.sqr > 0:
            return hints.statistics.var / hints.statistics.sqr
        fraction = 0.0
        if hints is not None and hints.target_progress:
            fraction = hints.progress / hints.target_progress
        return noise_at(self._noise_history(), fraction) or 0.0


class _OnOneKind:
    """Step times on nodes of one kind."""

    def __init__(self) -> None:
        self.profile: StudyProfile | None = None
        self._rows: dict[str, tuple[Observation, ...]] = {}
        self._new_rows: dict[str, list[Observation]] = {}
        self._configurations: set[Configuration] = set()
        self._factors: dict[str, float] = {}
        self._pooled_configurations = 0
        self._fitted_at = float("-inf")

    @property
    def num_configurations(self) -> int:
        return len(self._configurations)

    def note(self, trial_id: str, rows: tuple[Observation, ...]) -> None:
        before = set(self._rows.get(trial_id, ()))
        fresh = [row for row in rows if row not in before]
        self._new_rows.setdefault(trial_id, []).extend(fresh)
        self._configurations.update(row.configuration for row in fresh)
        self._rows[trial_id] = rows

    def profile_of(self, trial_id: str) -> tuple[StudyProfile, float]:
        """The pooled profile and the trial's factor."""
        assert self.profile is not None
        return self.profile, self._factors.get(trial_id, self.profile.typical_factor)

    def refresh(self, now: float) -> None:
        if not self._new_rows or now - self._fitted_at < REFIT_SECONDS:
            return
        if self.profile is None or self._is_surprised(self.profile):
            made = pool(self._rows)
            if made is None:
                return
            self.profile, self._factors = made
            self._pooled_configurations = len(self._configurations)
            self._fitted_at = now
        self._new_rows.clear()

    def _is_surprised(self, profile: StudyProfile) -> bool:
        if len(self._configurations) >= GROWTH * self._pooled_configurations:
            return True
        for trial_id, rows in self._new_rows.items():
            if not rows:
                continue
            factor = self._factors.get(trial_id)
            if factor is None or max(row.configuration.num_replicas for row in rows) > profile.most_replicas:
                return True
            if profile.surprise(rows, factor) > SURPRISE:
                return True
        return False
