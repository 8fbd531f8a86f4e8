"""Expected starts of trials that wait: from what those that train have left, and who comes first.

An estimate for people, which no decision stands on. Slots come free as trials end; those that wait take what they need
at least, in order of submission. Of a trial that has measured nothing yet it is believed that it takes as long as the
others have left on average; where nothing is known of any, nothing is said.
"""

from __future__ import annotations

import heapq
import math

import numpy as np

from scheduler.snapshot import Snapshot, TrialView


def expected_starts(snapshot: Snapshot) -> dict[str, float]:
    """Seconds from the snapshot's moment, by trial; without those that nothing can be said of."""
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
