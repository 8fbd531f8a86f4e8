"""Placements -> grants with reasons, for policies whose reasons are alike."""

from __future__ import annotations

from collections.abc import Mapping

from scheduler.snapshot import Grant, Placement, Snapshot, TrialView
from trials.record import Reason


def grants_for(snapshot: Snapshot, placed: Mapping[str, Placement], *, code: str, why: str) -> dict[str, Grant]:
    """Return a grant for each trial.

    One that would get less than its minimum gets nothing, and is told what it lacks.
    """
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
    each = f", {size} on one node for each replica" if size > 1 else ""
    needs = f"needs {slots(view.min_slots)}{each}"
    if snapshot.queued:
        return Reason(code="queued", sentence=f"{needs}; {on_their_way(snapshot, view.min_slots)}")
    if view.min_slots > snapshot.total_slots:
        return Reason(
            code="too_large",
            sentence=f"{needs}; the cluster has {snapshot.total_slots}, {snapshot.largest_node} on its largest node",
        )
    return Reason(code="no_free_slot", sentence=f"{needs}; {free} of {snapshot.total_slots} can be freed now")


def on_their_way(snapshot: Snapshot, needed: int) -> str:
    """Name the slots that are waited for, and why they are not there. Says nothing that changes by the second."""
    parts = []
    for each in snapshot.queued:
        if each.slots:
            when = "" if each.expected_in is None else f", expected in {_roughly(each.expected_in)}"
            parts.append(f"{min(needed, each.slots)} of its slots are queued in {each.where}{when}")
        if each.trouble:
            parts.append(each.trouble)
    return "; ".join(parts)


def _roughly(seconds: float) -> str:
    """Round to a minute, to ten of them, or to an hour."""
    minutes = seconds / 60.0
    if minutes < 1.0:
        return "less than a minute"
    if minutes < 20.0:
        return f"{minutes:.0f} min"
    return f"{10.0 * round(minutes / 10.0):.0f} min" if minutes < 90.0 else f"{minutes / 60.0:.0f} h"


def slots(count: int) -> str:
    return f"{count} slot" if count == 1 else f"{count} slots"
