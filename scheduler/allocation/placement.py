"""Counts of slots -> nodes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from scheduler.snapshot import NodeView, Placement


def free_slots(nodes: Iterable[NodeView], placements: Iterable[Placement]) -> dict[str, int]:
    """What the placements leave on each node; what they hold on nodes that are gone is gone as well."""
    free = {node.name: node.slots for node in nodes}
    for placement in placements:
        for node, count in placement.items():
            if node in free:
                free[node] -= count
    return free


def emptiest_first(free: dict[str, int], wanted: int) -> dict[str, int]:
    """Take slots from the node with the most room, then the next; ``free`` is changed. The first node wins ties."""
    placement: dict[str, int] = {}
    while wanted > 0 and free:
        node = max(free, key=lambda name: free[name])
        count = min(free[node], wanted)
        if count <= 0:
            break
        placement[node] = placement.get(node, 0) + count
        free[node] -= count
        wanted -= count
    return placement


def packed(
    counts: Mapping[str, int], nodes: Iterable[NodeView], current: Mapping[str, Placement], *, whole_nodes: bool = True
) -> dict[str, Placement]:
    """Place each trial's count so that trials span few nodes, and move as few of them as possible.

    A trial that keeps its count stays where it is if it spans no more nodes than it must. Others go, largest first:
    with a node's worth or more onto whole nodes, those it is on first; with less onto the node it fills best. Where
    no node is left for a large one, small ones that could stay make room, and are placed anew. ``whole_nodes``: counts
    beyond one node are cut to whole nodes if they do not fit otherwise; what does not fit at all gets what is left.
    """
    sizes = {node.name: node.slots for node in nodes}
    largest = max(sizes.values(), default=1)
    free = dict(sizes)
    placed: dict[str, Placement] = {}
    todo: list[str] = []
    for trial, count in counts.items():
        held = {node: held for node, held in current.get(trial, {}).items() if held > 0}
        stays = (
            sum(held.values()) == count
            and len(held) == -(-count // largest)
            and all(free.get(node, 0) >= held[node] for node in held)
        )
        if count and stays:
            placed[trial] = held
            for node in held:
                free[node] -= held[node]
        elif count:
            todo.append(trial)
    todo.sort(key=lambda trial: -counts[trial])
    index = 0
    while index < len(todo):
        trial = todo[index]
        index += 1
        evicted = _place_one(trial, counts[trial], sizes, free, placed, current.get(trial, {}))
        if evicted:
            todo[index:] = sorted([*todo[index:], *evicted], key=lambda name: -counts[name])
    return placed


def _place_one(
    trial: str,
    count: int,
    sizes: Mapping[str, int],
    free: dict[str, int],
    placed: dict[str, Placement],
    before: Placement,
) -> list[str]:
    """Place one trial; returns those that had to make room and have to be placed anew."""
    fits = [node for node in free if free[node] >= count]
    if fits:
        node = min(fits, key=lambda name: (free[name] - count, name not in before, name))
        placed[trial] = {node: count}
        free[node] -= count
        return []
    evicted: list[str] = []
    largest = max(sizes.values())
    if count >= largest:
        empty = [node for node in free if free[node] == sizes[node] == largest]
        empty.sort(key=lambda name: (name not in before, name))
        while len(empty) < count // largest:
            emptied = _cheapest_to_empty(sizes, free, placed)
            if emptied is None:
                break
            for other in [name for name, places in placed.items() if emptied in places]:
                free[emptied] += placed.pop(other)[emptied]
                evicted.append(other)
            empty.append(emptied)
        chosen = sorted(empty[: count // largest])
        placement = dict.fromkeys(chosen, largest)
        for node in chosen:
            free[node] = 0
        rest = count - sum(placement.values())
        if rest and (len(chosen) == count // largest or not chosen):
            placement.update(_rest(rest, free, before))
        if placement:
            placed[trial] = placement
        return evicted
    placement = _rest(count, free, before)
    if placement:
        placed[trial] = placement
    return evicted


def _rest(count: int, free: dict[str, int], before: Placement) -> dict[str, int]:
    """Slots beside whole nodes: on one node if it can be, else on the emptiest ones."""
    fits = [node for node in free if free[node] >= count]
    if fits:
        node = min(fits, key=lambda name: (free[name] - count, name not in before, name))
        free[node] -= count
        return {node: count}
    return emptiest_first(free, count)


def _cheapest_to_empty(
    sizes: Mapping[str, int], free: Mapping[str, int], placed: Mapping[str, Placement]
) -> str | None:
    """The node whose placed trials all lie on it alone, and are fewest; None when there is none."""
    on: dict[str, list[str]] = {node: [] for node in sizes if free[node] < sizes[node]}
    whole: dict[str, int] = dict.fromkeys(on, 0)
    for trial, placement in placed.items():
        for node, count in placement.items():
            if len(placement) == 1 and count < sizes[node]:
                on[node].append(trial)
                whole[node] += count
    largest = max(sizes.values())
    candidates = [
        node for node in on if on[node] and sizes[node] == largest and whole[node] == sizes[node] - free[node]
    ]
    return min(candidates, key=lambda node: (len(on[node]), whole[node], node), default=None)
