"""Rivals that serve one trial after another, in an order of their own: ASHA's, Tiresias and Optimus."""

from __future__ import annotations

from typing import Final

import numpy as np

from scheduler.allocation.fixed_size import serve_in_order
from scheduler.allocation.grants import grants_for
from scheduler.allocation.placement import stay_or_go
from scheduler.snapshot import Grant, Snapshot, TrialView

QUEUE_SLOT_SECONDS = 16 * 3600.0


class AshaStaticPolicy:
    """A fixed size for every trial, those that promise most start or resume first: ASHA's order (Li et al., MLSys'20).

    Which trials go on is the tuner's decision, as everywhere; this policy only never changes a trial's size.
    """

    name: Final = "asha_static"

    def allocate(self, snapshot: Snapshot) -> dict[str, Grant]:
        order = sorted(snapshot.eligible, key=lambda view: -view.promise)
        placed = serve_in_order(snapshot, order, skip=True)
        return grants_for(snapshot, placed, code="fixed_size", why="a fixed size, the most promising first")


class TiresiasPolicy:
    """Tiresias (Gu et al., NSDI'19): two queues by attained service, jobs of the size their users ask for.

    A trial starts in the first queue and falls into the second one when it has had so many slot-seconds. Each queue is
    served first come, first served, the first one before the second; who does not fit is skipped, and preempted if it
    ran.
    """

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


class OptimusPolicy:
    """Optimus (Peng et al., EuroSys'18): a slot at a time to the job whose remaining time it shortens most.

    Needs each trial's remaining work, and its speed by number of replicas; a trial without either keeps one slot.
    """

    name: Final = "optimus"

    def allocate(self, snapshot: Snapshot) -> dict[str, Grant]:
        node_slots = snapshot.largest_node
        eligible = snapshot.eligible
        left = snapshot.total_slots
        counts: dict[str, int] = {}
        seconds: dict[str, np.ndarray] = {}
        for view in eligible:
            counts[view.trial_id] = view.min_slots if view.min_slots <= left else 0
            left -= counts[view.trial_id]
            seconds[view.trial_id] = _remaining_seconds(view, node_slots, snapshot.total_slots)
        gains = {name: _gain(seconds[name], counts[name]) for name in counts if counts[name]}
        while left > 0 and gains:
            best = max(gains, key=lambda name: gains[name])
            if gains[best] <= 0:
                break
            counts[best] += 1
            left -= 1
            gains[best] = _gain(seconds[best], counts[best])
        placements = stay_or_go(sorted(eligible, key=lambda view: counts[view.trial_id]), counts, snapshot.nodes)
        return grants_for(snapshot, placements, code="remaining_time", why="this shortens the remaining times most")


def _remaining_seconds(view: TrialView, node_slots: int, total: int) -> np.ndarray:
    """Return the remaining seconds by number of replicas, from one on."""
    most = min(view.max_slots, total)
    if view.model is None or view.remaining_progress is None:
        return np.array([1.0])
    replicas = np.arange(1, most + 1)
    return np.asarray(view.remaining_progress / view.model.curve(node_slots, replicas))


def _gain(seconds: np.ndarray, count: int) -> float:
    return 0.0 if count >= len(seconds) else float(seconds[count - 1] - seconds[count])
