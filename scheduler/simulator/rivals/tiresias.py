"""Tiresias (Gu et al., NSDI'19): two queues by attained service, jobs of the size their users ask for.

A trial starts in the first queue and falls into the second one when it has had so many slot-seconds. Each queue is
served first come, first served, the first one before the second; who does not fit is skipped, and preempted if it ran.
"""

from __future__ import annotations

from typing import Final

from scheduler.allocation.grants import grants_for
from scheduler.allocation.placement import stay_or_go
from scheduler.snapshot import Grant, Snapshot

QUEUE_SLOT_SECONDS = 16 * 3600.0


class TiresiasPolicy:
    name: Final = "tiresias"

    def allocate(self, snapshot: Snapshot) -> dict[str, Grant]:
        eligible = snapshot.eligible
        order = sorted(eligible, key=lambda view: view.attained_slot_seconds >= QUEUE_SLOT_SECONDS)
        left = snapshot.total_slots
        counts: dict[str, int] = {}
        for view in order:
            if view.min_slots <= left:
                left -= view.min_slots
                counts[view.trial_id] = view.min_slots
        placements = stay_or_go(order, counts, snapshot.nodes)
        return grants_for(snapshot, placements, code="least_served", why="its queue is served now")
