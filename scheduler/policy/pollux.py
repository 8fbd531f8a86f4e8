"""Pollux (Qiao et al., OSDI'21, section 4.2): the power mean of the trials' speed-ups, with a penalty for restarts.

A trial's speed-up is its goodput relative to that with its fair share of the slots. The objective is their harmonic
mean (p = -1, the paper's choice); a trial whose allocation changes counts with the part of its age that restarts have
left it. For counts that are packed onto nodes this is a sum over trials, so the optimum is found exactly by dynamic
programming, where the paper searches allocation matrices with a genetic algorithm (``pollux_search``).
"""

from __future__ import annotations

import math
from typing import Final

import numpy as np
from numpy.typing import NDArray

from scheduler.allocation.counts import choose_counts
from scheduler.allocation.grants import grants_for
from scheduler.allocation.grid import count_grid
from scheduler.allocation.placement import packed
from scheduler.snapshot import Grant, Snapshot, TrialView

EXPLORATION = 2
"""A trial may have twice as many replicas as it was measured with (section 4.1)."""
SMALLEST_SHARE = 1e-3
"""Keeps the harmonic mean finite for a trial that gets nothing."""


class PolluxPolicy:
    name: Final = "pollux"

    def allocate(self, snapshot: Snapshot) -> dict[str, Grant]:
        eligible = snapshot.eligible
        node_slots = snapshot.largest_node
        counts = count_grid(eligible, snapshot.total_slots, node_slots)
        fair = max(1, math.ceil(snapshot.total_slots / max(1, len(eligible))))
        values = np.array([_values(view, counts, fair, node_slots, snapshot) for view in eligible])
        values = values.reshape(len(eligible), len(counts))
        chosen = counts[choose_counts(counts, values, snapshot.total_slots)]
        wanted = {view.trial_id: int(count) for view, count in zip(eligible, chosen, strict=True)}
        placed = packed(wanted, snapshot.nodes, {view.trial_id: view.placement for view in eligible})
        return grants_for(snapshot, placed, code="power_mean", why="the harmonic mean of all speed-ups is best so")


def _values(
    view: TrialView, counts: NDArray[np.int64], fair: int, node_slots: int, snapshot: Snapshot
) -> NDArray[np.float64]:
    """Minus the inverse of what each count is worth to the trial."""
    held = view.held_slots
    per_slot = len(snapshot.nodes) / max(1, snapshot.total_slots)
    most = view.max_replicas
    if view.model is None:
        most = max(view.min_replicas, held)
        speed = counts.astype(float)
        fair_speed = float(fair)
    else:
        most = min(most, max(EXPLORATION * view.model.most_profiled, view.min_replicas, held))
        speed = np.concatenate([[0.0], view.model.curve(node_slots, counts[1:])])
        fair_speed = float(np.interp(min(fair, most), counts, speed))
    age = snapshot.now - view.submitted_at
    factor = max(age - view.num_rescales * view.pause_seconds, 0.0) / (age + view.pause_seconds + 1e-9)
    share = speed / fair_speed * per_slot * np.where((counts == held) | (held == 0), 1.0, factor)
    values = -1.0 / (share + SMALLEST_SHARE)
    allowed = (counts == 0) | ((counts >= view.min_replicas) & (counts <= most)) | ((counts == held) & (held > 0))
    if held and not view.can_rescale:
        allowed = (counts == 0) | (counts == held)
    return np.where(allowed, values, -np.inf)
