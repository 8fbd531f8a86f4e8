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

from scheduler.allocation.counts import choose_counts, count_grid
from scheduler.allocation.grants import grants_for
from scheduler.allocation.placement import held_by, packed
from scheduler.allocation.power_mean import harmonic_values
from scheduler.snapshot import Grant, Snapshot


class PolluxPolicy:
    name: Final = "pollux"

    def allocate(self, snapshot: Snapshot) -> dict[str, Grant]:
        eligible = snapshot.eligible
        node_slots = snapshot.largest_node
        counts = count_grid(eligible, snapshot.total_slots, node_slots)
        fair = max(1, math.ceil(snapshot.total_slots / max(1, len(eligible))))
        values = np.array([harmonic_values(view, counts, fair, node_slots, snapshot) for view in eligible])
        values = values.reshape(len(eligible), len(counts))
        chosen = counts[choose_counts(counts, values, snapshot.total_slots)]
        wanted = {view.trial_id: int(count) for view, count in zip(eligible, chosen, strict=True)}
        placed = packed(wanted, snapshot.nodes, held_by(eligible))
        return grants_for(snapshot, placed, code="power_mean", why="this maximizes the harmonic mean of all speed-ups")
