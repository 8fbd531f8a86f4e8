"""Serving trials of a fixed size in a given order, without stopping one that runs."""

from __future__ import annotations

from collections.abc import Sequence

from scheduler.allocation.placement import emptiest_first, free_slots, part_of
from scheduler.allocation.whole_replicas import place_whole
from scheduler.snapshot import Placement, Snapshot, TrialView


def serve_in_order(snapshot: Snapshot, order: Sequence[TrialView], *, skip: bool) -> dict[str, Placement]:
    """Serve trials in ``order`` while there is room; running ones keep what they have up to their minimum.

    ``skip``: one that does not fit is passed over for the next; else all behind it wait.
    """
    placed: dict[str, Placement] = {
        view.trial_id: part_of(view.placement, view.min_slots) for view in order if view.held_slots
    }
    free = free_slots(snapshot.nodes, placed.values())
    left = sum(free.values())
    for view in order:
        if view.held_slots:
            continue
        if view.min_slots > left:
            if skip:
                continue
            break
        if view.slots_per_replica > 1:
            room = dict(free)
            placement = place_whole(view.min_slots, view.slots_per_replica, room, {}, snapshot.largest_node)
            if sum(placement.values()) < view.min_slots:
                if skip:
                    continue
                break
            free, placed[view.trial_id] = room, placement
        else:
            placed[view.trial_id] = emptiest_first(free, view.min_slots)
        left -= view.min_slots
    return placed
