"""Placements -> grants with reasons, for policies whose reasons are alike."""

from __future__ import annotations

from collections.abc import Mapping

from scheduler.snapshot import Grant, Placement, Snapshot, TrialView
from trials.record import Reason


def grants_for(snapshot: Snapshot, placed: Mapping[str, Placement], *, code: str, why: str) -> dict[str, Grant]:
    """A grant for each trial; one that would get less than its minimum gets nothing, and is told what it lacks."""
    usable = {
        view.trial_id: placed[view.trial_id]
        for view in snapshot.trials
        if sum(placed.get(view.trial_id, {}).values()) >= view.min_slots
    }
    free = snapshot.total_slots - sum(sum(placement.values()) for placement in usable.values())
    grants = {}
    for view in snapshot.trials:
        placement = usable.get(view.trial_id, {})
        count = sum(placement.values())
        if view.held is not None:
            reason = Reason(code="held", sentence=view.held)
        elif not count:
            reason = waits(view, snapshot, free)
        else:
            reason = Reason(code=code, sentence=f"{slots(count)}: {why}")
        grants[view.trial_id] = Grant(placement=placement, reason=reason)
    return grants


def waits(view: TrialView, snapshot: Snapshot, free: int) -> Reason:
    """Why a trial gets nothing, and what it would need."""
    size = view.slots_per_replica
    each = f", {size} of one node for each of its replicas" if size > 1 else ""
    if view.min_slots > snapshot.total_slots:
        return Reason(
            code="too_large",
            sentence=f"needs {slots(view.min_slots)}{each}; the cluster has {snapshot.total_slots}, "
            f"{snapshot.largest_node} on its largest node",
        )
    return Reason(
        code="no_free_slot",
        sentence=f"needs {slots(view.min_slots)}{each}; {free} of {snapshot.total_slots} can be freed now",
    )


def slots(count: int) -> str:
    return f"{count} slot" if count == 1 else f"{count} slots"
