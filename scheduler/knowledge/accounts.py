"""Slot hours that trials, studies and users have had: for policies in total, for people by the day."""

from __future__ import annotations

import datetime
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter

from trials.errors import InvalidStudyTerms
from trials.record import ReplicaRecord, Study, TrialRecord
from trials.store import TrialStore
from trials.store.base import SlotInterval

logger = logging.getLogger(__name__)

DAY = datetime.timedelta(days=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotHours:
    """Slot hours that a study used on one day of this machine's calendar."""

    study: str
    day: str
    """As ``2026-11-25``."""
    hours: float
    trials: int
    """Trials that held a slot on that day."""


def slot_hours_by_study(
    records: Iterable[TrialRecord],
    intervals: Iterable[SlotInterval],
    now: float,
    *,
    zone: datetime.tzinfo | None = None,
) -> list[SlotHours]:
    """Return slot hours in order of day and study. ``zone``: whose midnight it is; None: this machine's."""
    study_of = {record.trial_id: record.spec.study for record in records}
    hours: dict[tuple[str, str], float] = {}
    trials: dict[tuple[str, str], set[str]] = {}
    for interval in intervals:
        study = study_of.get(interval.trial_id)
        if study is None:
            continue
        for day, seconds in _by_day(interval.began, now if interval.ended is None else interval.ended, zone):
            hours[day, study] = hours.get((day, study), 0.0) + seconds / 3600.0
            trials.setdefault((day, study), set()).add(interval.trial_id)
    return [
        SlotHours(study=study, day=day, hours=hours[day, study], trials=len(trials[day, study]))
        for day, study in sorted(hours)
    ]


def _by_day(began: float, ended: float, zone: datetime.tzinfo | None) -> list[tuple[str, float]]:
    """Return the seconds of an interval by day."""
    parts = []
    at = datetime.datetime.fromtimestamp(began, zone).astimezone(zone)
    end = datetime.datetime.fromtimestamp(max(began, ended), zone).astimezone(zone)
    while True:
        midnight = datetime.datetime.combine(at.date() + DAY, datetime.time(), at.tzinfo)
        parts.append((at.date().isoformat(), (min(end, midnight) - at).total_seconds()))
        if end <= midnight:
            return parts
        at = midnight


def slot_seconds_by_trial(intervals: Iterable[SlotInterval], now: float) -> dict[str, float]:
    seconds: dict[str, float] = {}
    for interval in intervals:
        ended = now if interval.ended is None else interval.ended
        seconds[interval.trial_id] = seconds.get(interval.trial_id, 0.0) + max(0.0, ended - interval.began)
    return seconds


class Usage:
    """Slot seconds that trials and studies have had so far.

    The store's account is read where a trial's replicas have changed, so that what came and went between two looks
    counts as long as it was there; in between they only grow older.
    """

    def __init__(self, store: TrialStore) -> None:
        self._store = store
        self._of_trial: dict[str, float] = {}
        self._of_study: dict[str, float] = {}
        self._served: dict[str, float] = {}
        self._live: dict[str, tuple[str, frozenset[str]]] = {}
        """Study and replicas of each trial that had some at the last look."""
        self._ended: dict[str, str] = {}
        """Studies of trials that have ended since."""
        self._looked_at: float | None = None

    def of_trial(self, trial_id: str) -> float:
        return self._of_trial.get(trial_id, 0.0)

    def of_study(self, study: str) -> float:
        return self._of_study.get(study, 0.0)

    def served_seconds(self, trial_id: str) -> float:
        """Return the seconds for which the trial has had any slot."""
        return self._served.get(trial_id, 0.0)

    def note_end(self, trial: TrialRecord) -> None:
        self._ended[trial.trial_id] = trial.spec.study

    def look(self, replicas_of: Mapping[str, Sequence[ReplicaRecord]], study_of: Mapping[str, str], now: float) -> None:
        """Bring the account up to now. ``replicas_of``: those that are there; ``study_of``: studies of live trials."""
        studies = {**{name: study for name, (study, _) in self._live.items()}, **self._ended, **study_of}
        live = {
            name: (studies[name], frozenset(row.replica_id for row in rows))
            for name, rows in replicas_of.items()
            if name in studies
        }
        if self._looked_at is None:
            studies = {trial.trial_id: trial.spec.study for trial in self._store.trials()}
            by_trial: dict[str, list[SlotInterval]] = {}
            for interval in self._store.slot_intervals():
                by_trial.setdefault(interval.trial_id, []).append(interval)
            for name, intervals in by_trial.items():
                self._settle(name, studies[name], intervals, now)
        else:
            changed = {name for name in live.keys() | self._live.keys() if live.get(name) != self._live.get(name)}
            for name in live.keys() - changed:
                study, replicas = live[name]
                self._add(name, study, len(replicas) * (now - self._looked_at), now - self._looked_at)
            for name in changed | self._ended.keys():
                rows = self._store.replicas(trial_id=name, live_only=False)
                self._settle(name, studies[name], [SlotInterval.of(row) for row in rows], now)
        self._live, self._ended, self._looked_at = live, {}, now

    def _settle(self, trial_id: str, study: str, intervals: Iterable[SlotInterval], now: float) -> None:
        """Set the trial's account to what its intervals add up to."""
        total, served, until = 0.0, 0.0, float("-inf")
        for interval in sorted(intervals, key=lambda interval: interval.began):
            ended = now if interval.ended is None else interval.ended
            total += max(0.0, ended - interval.began)
            served += max(0.0, ended - max(interval.began, until))
            until = max(until, ended)
        self._add(trial_id, study, total - self.of_trial(trial_id), served - self.served_seconds(trial_id))

    def _add(self, trial_id: str, study: str, seconds: float, served: float) -> None:
        self._of_trial[trial_id] = self.of_trial(trial_id) + seconds
        self._of_study[study] = self.of_study(study) + seconds
        self._served[trial_id] = self.served_seconds(trial_id) + served

    def forget(self, trial_id: str) -> None:
        self._of_trial.pop(trial_id, None)
        self._served.pop(trial_id, None)

    def forget_study(self, study: str) -> None:
        self._of_study.pop(study, None)


def effective_priorities(studies: Iterable[Study]) -> dict[str, int]:
    """Return priorities by study: its own, or one less than the lowest that it yields to, whichever is less.

    Names of studies that are not there (any more) are ignored. Raises InvalidStudyTerms when studies yield in a
    circle.
    """
    by_name = {study.name: study for study in studies}
    called = _by_what_they_are_called(by_name.values())
    before = {
        name: [other for named in study.terms.yields_to for other in called.get(named, ())]
        for name, study in by_name.items()
    }
    try:
        order = list(TopologicalSorter(before).static_order())
    except CycleError as error:
        circle = " -> ".join(reversed(error.args[1]))
        raise InvalidStudyTerms(f"studies yield to each other in a circle: {circle}; remove one of these") from None
    found: dict[str, int] = {}
    for name in order:
        found[name] = min([by_name[name].terms.priority, *(found[other] - 1 for other in before[name])])
    return found


def priorities_of(studies: Mapping[str, Study]) -> dict[str, int]:
    """Return the effective priorities; each study's own where they contradict each other."""
    try:
        return effective_priorities(studies.values())
    except InvalidStudyTerms as error:
        logger.error("yields_to contradicts itself, each study keeps its own priority error=%s", error)
        return {name: study.terms.priority for name, study in studies.items()}


def unknown_names(study: Study, studies: Iterable[Study]) -> list[str]:
    """Whom it yields to and nobody is called; a study of that name may still come."""
    called = _by_what_they_are_called(studies)
    return [name for name in study.terms.yields_to if name not in called]


def _by_what_they_are_called(studies: Iterable[Study]) -> dict[str, list[str]]:
    """Names of studies: all of one title, and the one of a name that is nobody's title."""
    by_title: dict[str, list[str]] = {}
    names = []
    for study in studies:
        by_title.setdefault(study.called, []).append(study.name)
        names.append(study.name)
    return {name: [name] for name in names} | by_title
