"""Waiting: who waited for what, from the trials' histories, and when those that wait may expect to start. Pure."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from scheduler.snapshot import Snapshot, TrialView
from trials.record import TrialRecord
from trials.states import FINAL_STATES, TrialState
from trials.store.base import HistoryEntry

WAITS = "waits"
_HOLDS = {state.value for state in TrialState if state.holds_slots}
_ENDS = {state.value for state in FINAL_STATES}


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitingSeries:
    at: list[float]
    """Ends of the bins, in seconds since the epoch."""
    reasons: dict[str, list[float]]
    """Trials that waited for each reason, on average within each bin."""


def waiting_series(
    records: Iterable[TrialRecord], entries: Sequence[HistoryEntry], now: float, *, bins: int, cut: bool = False
) -> WaitingSeries:
    """Return the series from the first submission to the last end, or to now where trials are live.

    ``entries``: the newest first. Until its first one a trial waited to be looked at. ``cut``: there were older ones;
    trials from before the oldest of these are left out.
    """
    of_trial: dict[str, list[HistoryEntry]] = {}
    for entry in reversed(entries):
        of_trial.setdefault(entry.trial_id, []).append(entry)
    if cut and entries:
        records = [record for record in records if record.submitted_at >= entries[-1].at]
    spans: list[tuple[str, float, float]] = []
    first, last = float("inf"), float("-inf")
    for record in records:
        end = now if record.finished_at is None else record.finished_at
        first, last = min(first, record.submitted_at), max(last, end)
        spans += _waits(record, of_trial.get(record.trial_id, []), end)
    if not first < last:
        return WaitingSeries(at=[], reasons={})
    edges = np.linspace(first, last, bins + 1)
    width = edges[1] - edges[0]
    reasons: dict[str, np.ndarray[tuple[int], np.dtype[np.float64]]] = {}
    for reason, began, ended in spans:
        shares = np.clip(np.minimum(ended, edges[1:]) - np.maximum(began, edges[:-1]), 0.0, None) / width
        reasons[reason] = reasons.get(reason, np.zeros(bins)) + shares
    ordered = sorted(reasons.items(), key=lambda item: -float(item[1].sum()))
    return WaitingSeries(
        at=edges[1:].tolist(), reasons={reason: np.round(counts, 4).tolist() for reason, counts in ordered}
    )


def _waits(record: TrialRecord, history: Sequence[HistoryEntry], end: float) -> list[tuple[str, float, float]]:
    """Reason, begin and end of each time that the trial held no slot."""
    waits = []
    reason: str | None = "submitted"
    since = record.submitted_at
    for entry in history:
        changes = entry.what == WAITS or entry.what in (TrialState.PENDING.value, TrialState.PAUSED.value)
        if not changes and entry.what not in _HOLDS and entry.what not in _ENDS:
            continue
        if reason is not None and entry.at > since:
            waits.append((reason, since, min(entry.at, end)))
        reason, since = (entry.reason.code if changes else None), entry.at
    if reason is not None and end > since and not (history and history[-1].what in _ENDS):
        waits.append((reason, since, end))
    return waits


def expected_starts(snapshot: Snapshot) -> dict[str, float]:
    """Seconds from the snapshot's moment, by trial; without those that nothing can be said of.

    An estimate for people, which no decision stands on. Slots come free as trials end; those that wait take what they
    need at least, in order of submission. Of a trial that has measured nothing yet it is believed that it takes as long
    as the others have left on average; where nothing is known of any, nothing is said.
    """
    trials = snapshot.eligible
    training = [(seconds_left(view), view) for view in trials if view.held_slots]
    lengths = [view.served_seconds + left for left, view in training if math.isfinite(left)]
    if not lengths:
        return {}
    typical = max(1.0, float(np.mean(lengths)))
    ends = [(left, view.held_slots) for left, view in training]
    heapq.heapify(ends)
    free = snapshot.total_slots - sum(view.held_slots for _, view in training)
    starts: dict[str, float] = {}
    now = 0.0
    for view in trials:
        if view.held_slots:
            continue
        while free < view.min_slots and ends:
            at, slots = heapq.heappop(ends)
            now, free = max(now, at), free + slots
        if free < view.min_slots or not math.isfinite(now):
            break
        starts[view.trial_id] = now
        free -= view.min_slots
        heapq.heappush(ends, (now + typical, view.min_slots))
    return starts


def seconds_left(view: TrialView) -> float:
    """Until the trial is over, at the size that it has; infinite where nothing can be said."""
    if view.model is None or view.remaining_progress is None or not view.held_slots:
        return math.inf
    goodput = float(view.model.curve(max(view.placement.values()), np.array([view.held_slots]))[0])
    if not math.isfinite(goodput) or goodput <= 0.0:
        return math.inf
    return max(0.0, view.remaining_progress * view.expected_part / goodput)
