"""Trials that are about to be submitted: those that a study's driver sends when others of it end.

Between a trial's end and its successor's submission lie the driver's round trip and its sampler, a few milliseconds or
some seconds. Slots that are free only for so long are no room to grow into. A driver says how many trials it keeps
submitted and how many it will still send; how long it takes is learned from its earlier ones. One thread calls it.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from trials.record import TrialRecord

FIRST_GAP_SECONDS = 1.0
"""Waited for the next trial of a study that has not yet shown how long it takes."""
PATIENCE = 3.0
"""Times the typical gap; then something else keeps the driver, such as its end."""
LEAST_PATIENCE_SECONDS = 0.2
MOST_PATIENCE_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class Plans:
    """Plans of a driver for its study."""

    at_a_time: int
    """Trials that it keeps submitted."""
    left: int | None
    """Trials that it will still send; None: nobody knows."""


@dataclass(slots=True)
class _Study:
    latest: TrialRecord
    live: frozenset[str] = frozenset()
    submitted: int = 0
    """Trials seen so far."""
    most_live: int = 0
    ends: deque[float] = field(default_factory=deque)
    """Times of ends that no submission has followed."""
    gaps: deque[float] = field(default_factory=lambda: deque(maxlen=15))
    changed_at: float = 0.0
    plans: Plans | None = None
    submitted_then: int = 0
    """Trials that had been seen when it said so."""


class ComingTrials:
    def __init__(self) -> None:
        self._studies: dict[str, _Study] = {}

    def look(self, trials: Sequence[TrialRecord], plans: Mapping[str, Plans], now: float) -> None:
        """Note all live trials, and by study the latest plans that drivers have told."""
        live: dict[str, dict[str, TrialRecord]] = {}
        for trial in trials:
            live.setdefault(trial.spec.study, {})[trial.trial_id] = trial
        for name in live.keys() | self._studies.keys():
            trials_of_study = live.get(name, {})
            study = self._studies.get(name)
            if study is None:
                study = self._studies[name] = _Study(latest=next(iter(trials_of_study.values())))
            self._follow(study, trials_of_study, now)
            said = plans.get(name)
            if said is not None and said is not study.plans:
                study.plans, study.submitted_then = said, study.submitted

    def _follow(self, study: _Study, live: Mapping[str, TrialRecord], now: float) -> None:
        for _ in study.live - live.keys():
            study.ends.append(now)
            study.changed_at = now
        for trial_id in live.keys() - study.live:
            trial = live[trial_id]
            study.submitted += 1
            study.changed_at = max(study.changed_at, trial.submitted_at)
            study.latest = trial
            if study.ends:
                study.gaps.append(max(0.0, trial.submitted_at - study.ends.popleft()))
        study.live = frozenset(live)
        study.most_live = max(study.most_live, len(live))

    def forget(self, name: str) -> None:
        """Forget a study in which nothing has run for long."""
        self._studies.pop(name, None)

    def of(self, name: str, now: float) -> tuple[int, TrialRecord | None]:
        """Return the number of the study's trials that are about to come, and the latest one, which they resemble."""
        study = self._studies.get(name)
        if study is None:
            return 0, None
        gap = statistics.median(study.gaps) if study.gaps else FIRST_GAP_SECONDS / PATIENCE
        patience = min(max(PATIENCE * gap, LEAST_PATIENCE_SECONDS), MOST_PATIENCE_SECONDS)
        if now - study.changed_at > patience:
            study.ends.clear()
            return 0, study.latest
        plans = study.plans
        if plans is None:
            # As many as there were: each that ends is replaced.
            return min(len(study.ends), max(0, study.most_live - len(study.live))), study.latest
        missing = max(0, plans.at_a_time - len(study.live))
        if plans.left is not None:
            missing = min(missing, max(0, plans.left - (study.submitted - study.submitted_then)))
        return missing, study.latest
