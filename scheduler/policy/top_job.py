"""All that the minimums leave over goes to the best trial, as Ray Tune's DistributeResourcesToTopJob gives it."""

from __future__ import annotations

from typing import Final

from scheduler.allocation.grants import grants_for
from scheduler.allocation.placement import held_by, packed
from scheduler.allocation.spreading import spread_left_over
from scheduler.allocation.whole_replicas import sizes_of
from scheduler.snapshot import Grant, Snapshot


class TopJobPolicy:
    name: Final = "top_job"

    def allocate(self, snapshot: Snapshot) -> dict[str, Grant]:
        eligible = snapshot.eligible
        counts = spread_left_over(snapshot, eligible, lambda view, count: (-view.promise, -view.held_slots))
        placed = packed(counts, snapshot.nodes, held_by(eligible), sizes=sizes_of(eligible))
        return grants_for(
            snapshot, placed, code="top_job", why="the best trial gets all slots beyond the others' minimums"
        )
