"""Placing replicas that take several slots each: all slots of one on one node, where that is large enough.

One that is larger than a node takes whole nodes, and what is left over of another one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set
from dataclasses import replace

from scheduler.snapshot import Grant, NodeView, Placement, Snapshot, TrialView
from trials.record import Reason


def place_whole(count: int, size: int, free: dict[str, int], held: Placement, largest_node: int) -> dict[str, int]:
    """Place ``count`` slots, or fewer, in replicas of ``size``; ``free`` is changed.

    Where it is first, then on as few other nodes as can be: on the one that it fills best.
    """
    count = count // size * size
    if size > largest_node:
        return _over_nodes(count, size, free, held)
    placement: dict[str, int] = {}
    left = count
    for node in sorted(held, key=lambda name: -held[name]):
        taken = min(held[node], free.get(node, 0), left) // size * size
        if taken:
            placement[node] = taken
            left -= taken
    for node in [*placement, *sorted(free, key=lambda name: free[name])]:
        # The fullest node that takes all of the rest, if there is one.
        room = free[node] - placement.get(node, 0)
        if left and room >= left:
            placement[node] = placement.get(node, 0) + left
            left = 0
    for node in sorted(free, key=lambda name: -free[name]):
        taken = min(free[node] - placement.get(node, 0), left) // size * size
        if taken:
            placement[node] = placement.get(node, 0) + taken
            left -= taken
    for node, taken in placement.items():
        free[node] -= taken
    return placement


def _over_nodes(count: int, size: int, free: dict[str, int], held: Placement) -> dict[str, int]:
    order = [*sorted(held, key=lambda name: -held[name]), *sorted(free, key=lambda name: -free[name])]
    order = [node for node in dict.fromkeys(order) if free.get(node, 0) > 0]
    count = min(count, sum(free[node] for node in order) // size * size)
    placement: dict[str, int] = {}
    for node in order:
        taken = min(free[node], count - sum(placement.values()))
        if taken:
            placement[node] = taken
    for node, taken in placement.items():
        free[node] -= taken
    return placement


def sizes_of(views: Iterable[TrialView]) -> dict[str, int]:
    """Slots of a replica, of the trials where they are several."""
    return {view.trial_id: view.slots_per_replica for view in views if view.slots_per_replica > 1}


def packed_whole(
    counts: Mapping[str, int],
    sizes: Mapping[str, int],
    nodes: Iterable[NodeView],
    current: Mapping[str, Placement],
    *,
    left_alone: Set[str] = frozenset(),
) -> tuple[dict[str, Placement], list[NodeView]]:
    """Placements of the trials whose replicas take several slots, and the nodes with what those leave.

    What single slots hold is theirs to move, unless they are ``left_alone``.
    """
    nodes = list(nodes)
    free = {node.name: node.slots for node in nodes}
    # One that is larger than what is left of a node is not larger than a node.
    largest = max((node.largest_alike for node in nodes), default=1)
    large = [trial for trial, size in sizes.items() if size > 1 and counts.get(trial)]
    if not large:
        return {}, nodes
    for trial in left_alone - set(large):
        for node, count in current.get(trial, {}).items():
            if node in free:
                free[node] = max(0, free[node] - count)
    placed: dict[str, Placement] = {}
    for trial in sorted(large, key=lambda trial: (trial not in left_alone, not current.get(trial), -counts[trial])):
        placed[trial] = place_whole(counts[trial], sizes[trial], free, current.get(trial, {}), largest)
    used: dict[str, int] = {}
    for placement in placed.values():
        for node, count in placement.items():
            used[node] = used.get(node, 0) + count
    return placed, [replace(node, slots=node.slots - used.get(node.name, 0)) for node in nodes]


def in_whole_replicas(snapshot: Snapshot, grants: Mapping[str, Grant]) -> dict[str, Grant]:
    """Cut the grants of policies that know only slots to whole replicas."""
    views = {view.trial_id: view for view in snapshot.trials}
    whole_grants = {}
    for trial, grant in grants.items():
        view = views[trial]
        option = view.option(grant.layout)
        largest = snapshot.largest_like(grant.placement)
        if not view.is_whole(grant.placement, largest, grant.layout):
            size, room = option.slots_per_replica, dict(grant.placement)
            placement = place_whole(sum(room.values()), size, room, view.placement, largest)
            reason = grant.reason
            if sum(placement.values()) < option.min_slots:
                placement = {}
                sentence = f"each of its replicas needs {size} slots on one node; no node has that many free"
                reason = Reason(code="no_free_block", sentence=sentence)
            grant = replace(grant, placement=placement, reason=reason)
        whole_grants[trial] = grant
    return whole_grants
