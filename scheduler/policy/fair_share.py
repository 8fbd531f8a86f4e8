"""The same number of slots for every trial, as Ray Tune's DistributeResources gives: in a sweep, the one to beat."""

from __future__ import annotations

from typing import Final

from scheduler.allocation.grants import grants_for
from scheduler.allocation.placement import held_by, packed
from scheduler.allocation.spreading import spread_left_over
from scheduler.allocation.whole_replicas import sizes_of
from scheduler.snapshot import Grant, Snapshot


class FairSharePolicy:
    name: Final = "fair_share"

    def allocate(self, snapshot: Snapshot) -> dict[str, Grant]:
        eligible = snapshot.eligible
        # By weight, and those that have had more keep it: a slot does not wander between equals.
        counts = spread_left_over(
            snapshot, eligible, lambda view, count: ((count + 1) / view.study_weight, -view.held_slots)
        )
        placed = packed(counts, snapshot.nodes, held_by(eligible), sizes=sizes_of(eligible))
        return grants_for(snapshot, placed, code="fair_share", why="an equal share")
