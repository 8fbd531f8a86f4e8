"""Accounts: who has used how many slot hours on which day. Pure; for people."""

from __future__ import annotations

import datetime
from collections.abc import Iterable
from dataclasses import dataclass

from trials.record import TrialRecord
from trials.store.base import SlotInterval

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
