"""Pollux's objective for one trial, by number of slots (OSDI'21, section 4.2)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from scheduler.snapshot import Snapshot, TrialView

EXPLORATION = 2
"""A trial may have twice as many replicas as it was measured with (section 4.1)."""
SMALLEST_SHARE = 1e-3
"""Keeps the harmonic mean finite for a trial that gets nothing."""


def largest_count(view: TrialView) -> int:
    """Return the most slots it may hold: a trial that cannot be resized now keeps what it has."""
    return view.max_slots if view.can_rescale else max(view.max_slots, view.held_slots)


def harmonic_values(
    view: TrialView, counts: NDArray[np.int64], fair: int, node_slots: int, snapshot: Snapshot
) -> NDArray[np.float64]:
    """Minus the inverse of what each count is worth to the trial; -inf for counts that it may not have now.

    fair: slots of a fair share; the sum over trials is largest where the harmonic mean of their shares is.
    """
    held = view.held_slots
    per_slot = len(snapshot.nodes) / max(1, snapshot.total_slots)
    most = largest_count(view)
    if view.model is None:
        most = min(most, max(view.min_slots, held))
        speed = counts.astype(float)
        fair_speed = float(fair)
    else:
        most = min(most, max(EXPLORATION * view.model.most_profiled, view.min_slots, held))
        speed = np.concatenate([[0.0], view.model.curve(node_slots, counts[1:])])
        fair_speed = float(np.interp(min(fair, most), counts, speed))
    age = snapshot.now - view.submitted_at
    factor = max(age - view.num_rescales * view.pause_seconds, 0.0) / (age + view.pause_seconds + 1e-9)
    share = speed / fair_speed * per_slot * np.where((counts == held) | (held == 0), 1.0, factor)
    values = -1.0 / (share + SMALLEST_SHARE)
    allowed = (counts == 0) | ((counts >= view.min_slots) & (counts <= most))
    if held and not view.can_rescale:
        allowed = (counts == 0) | (counts == held)
    return np.where(allowed, values, -np.inf)
