"""Tiresias (Gu et al., NSDI'19): two queues by attained service, jobs of the size their users ask for.

A trial starts in the first queue and falls into the second one when it has had so many slot-seconds. Each queue is
served first come, first served, the first one before the second; who does not fit is skipped, and preempted if it ran.
"""

from __future__ import annotations

from typing import Final

from scheduler.allocation.grants import grants_for
from scheduler.allocation.placement import emptiest_first, free_slots
from scheduler.snapshot import Grant, Placement, Snapshot

QUEUE_SLOT_SECONDS = 16 * 3600.0


class TiresiasPolicy:
    name: Final = "tiresias"

    def allocate(self, snapshot: Snapshot) -> dict[str, Grant]:
        eligible = snapshot.eligible
        order = sorted(eligible, key=lambda view: view.attained_slot_seconds >= QUEUE_SLOT_SECONDS)
        left = snapshot.total_slots
        served = set()
        for view in order:
            if view.min_slots <= left:
                left -= view.min_slots
                served.add(view.trial_id)
        placements: dict[str, Placement] = {
            view.trial_id: view.placement
            for view in order
            if view.trial_id in served and view.held_slots == view.min_slots
        }
        free = free_slots(snapshot.nodes, placements.values())
        for view in order:
            if view.trial_id in served and view.trial_id not in placements:
                placements[view.trial_id] = emptiest_first(free, view.min_slots)
        return grants_for(snapshot, placements, code="least_served", why="its queue is served now")
