"""Giving out what the minimums leave over, a slot at a time in a given order."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from scheduler.snapshot import Snapshot, TrialView


def spread_left_over(
    snapshot: Snapshot, views: Sequence[TrialView], key: Callable[[TrialView, int], tuple[float, ...]]
) -> dict[str, int]:
    """Spread slots: minimums first, running trials before waiting ones, then by ``key``.

    Each further replica goes to the trial whose ``key(view, count)`` is smallest. Nobody gets more than its maximum, or
    than it has while it cannot be rescaled.
    """
    left = snapshot.total_slots
    counts: dict[str, int] = {}
    for view in sorted(views, key=lambda view: view.held_slots == 0):
        counts[view.trial_id] = view.min_slots if view.min_slots <= left else 0
        left -= counts[view.trial_id]
    growing = [view for view in views if counts[view.trial_id]]
    while left > 0:
        growing = [view for view in growing if counts[view.trial_id] + view.slots_per_replica <= _most(view)]
        growing = [view for view in growing if view.slots_per_replica <= left]
        if not growing:
            break
        best = min(growing, key=lambda view: key(view, counts[view.trial_id]))
        counts[best.trial_id] += best.slots_per_replica
        left -= best.slots_per_replica
    return counts


def _most(view: TrialView) -> int:
    return view.max_slots if view.can_rescale else max(view.held_slots, view.min_slots)
