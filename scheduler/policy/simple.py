"""Plain policies: first come, first served, which most clusters do; and the two that Ray Tune has.

``fair_share`` gives every trial the same number of slots, as Ray Tune's DistributeResources does: in a sweep, the one
to beat. ``top_job`` gives the best trial all that the minimums leave over, as DistributeResourcesToTopJob does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from scheduler.allocation.fixed_size import serve_in_order
from scheduler.allocation.grants import grants_for
from scheduler.allocation.placement import held_by, packed
from scheduler.allocation.whole_replicas import sizes_of
from scheduler.snapshot import Grant, Snapshot, TrialView

Key = Callable[[TrialView, int], tuple[float, ...]]
"""Place of a trial that has so many slots among those that want one more: the smallest is served."""


class FifoPolicy:
    name: Final = "fifo"

    def allocate(self, snapshot: Snapshot) -> dict[str, Grant]:
        placed = serve_in_order(snapshot, snapshot.eligible, skip=False)
        return grants_for(snapshot, placed, code="first_come", why="first come, first served")


@dataclass(frozen=True, slots=True)
class SpreadPolicy:
    """Minimums first, then one slot at a time by a key; a trial that has had more keeps it among equals."""

    name: str
    key: Key
    why: str

    def allocate(self, snapshot: Snapshot) -> dict[str, Grant]:
        eligible = snapshot.eligible
        counts = _spread(snapshot, eligible, self.key)
        placed = packed(counts, snapshot.nodes, held_by(eligible), sizes=sizes_of(eligible))
        return grants_for(snapshot, placed, code=self.name, why=self.why)


def fair_share() -> SpreadPolicy:
    return SpreadPolicy(
        "fair_share", lambda view, count: ((count + 1) / view.study_weight, -view.held_slots), "an equal share"
    )


def top_job() -> SpreadPolicy:
    why = "the best trial gets all slots beyond the others' minimums"
    return SpreadPolicy("top_job", lambda view, count: (-view.promise, -view.held_slots), why)


def _spread(snapshot: Snapshot, views: Sequence[TrialView], key: Key) -> dict[str, int]:
    """Spread slots: minimums first, running trials before waiting ones, then by ``key``.

    Nobody gets more than its maximum, or than it has while it cannot be rescaled.
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
