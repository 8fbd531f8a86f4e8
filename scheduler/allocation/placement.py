"""Counts of slots -> nodes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from types import MappingProxyType

from scheduler.allocation.whole_replicas import packed_whole
from scheduler.snapshot import NodeView, Placement, TrialView


def free_slots(nodes: Iterable[NodeView], placements: Iterable[Placement]) -> dict[str, int]:
    """Return what the placements leave on each node; placements on nodes that are gone free nothing."""
    free = {node.name: node.slots for node in nodes}
    for placement in placements:
        for node, count in placement.items():
            if node in free:
                free[node] -= count
    return free


def stay_or_go(
    views: Iterable[TrialView], counts: Mapping[str, int], nodes: Sequence[NodeView]
) -> dict[str, Placement]:
    """Place trials whose count is what they hold where they are, the others, in this order, emptiest nodes first."""
    views = list(views)
    placements = {
        view.trial_id: view.placement
        for view in views
        if view.held_slots and view.held_slots == counts.get(view.trial_id)
    }
    free = free_slots(nodes, placements.values())
    for view in views:
        if counts.get(view.trial_id) and view.trial_id not in placements:
            placements[view.trial_id] = emptiest_first(free, counts[view.trial_id])
    return placements


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


def held_by(views: Iterable[TrialView]) -> dict[str, Placement]:
    """Return each trial's present placement."""
    return {view.trial_id: view.placement for view in views}


def packed(
    counts: Mapping[str, int],
    nodes: Iterable[NodeView],
    current: Mapping[str, Placement],
    *,
    left_alone: Set[str] = frozenset(),
    rooted: Set[str] = frozenset(),
    sizes: Mapping[str, int] = MappingProxyType({}),
) -> dict[str, Placement]:
    """Place each trial's count so that trials span few nodes, and move as few of them as possible.

    A trial that keeps its count stays where it is if it spans no more nodes than it must; one of ``left_alone`` in any
    case. Others go, largest first: with a node's worth or more onto whole nodes, those it is on first; with less onto
    the node it fills best. Where no node is left for a large one, small ones that could stay make room, and are placed
    anew. A large one that cannot have its whole nodes gets fewer; a small one that fits nowhere is spread.

    Trials of ``rooted`` shrink and grow where they are, as far as there is room, and move only to slots that nobody is
    to move away from: two that waited for each other's slots would both wait in vain.

    ``sizes``: slots of a replica, where they are several: those trials come first, because they cannot be spread.
    """
    whole, nodes = packed_whole(counts, sizes, nodes, current, left_alone=left_alone)
    counts = {trial: count for trial, count in counts.items() if trial not in whole}
    room = _Room(nodes)
    placed: dict[str, Placement] = {}
    todo: list[str] = []
    reserved: dict[str, Placement] = {}
    """Slots that trials which move hold until they have moved."""
    for trial, count in counts.items():
        if not count:
            continue
        held = {node: held for node, held in current.get(trial, {}).items() if held > 0}
        kept = part_of(held, count) if trial in rooted else held
        least_nodes = -(-count // room.largest)
        stays = len(kept) == least_nodes or (trial in left_alone and kept == held)
        if sum(kept.values()) == count and stays and room.has(kept):
            room.take(kept)
            placed[trial] = kept
        else:
            todo.append(trial)
            if trial in rooted and held and room.has(held):
                room.take(held)
                reserved[trial] = held
    todo.sort(key=lambda trial: -counts[trial])
    index = 0
    while index < len(todo):
        trial = todo[index]
        index += 1
        before = current.get(trial, {})
        held = dict(reserved.pop(trial, {}))
        room.give_back(held)
        evicted: list[str] = []
        placement: Placement
        if held:
            placement = _from_where_it_is(counts[trial], room, held)
            left = {node: count - placement.get(node, 0) for node, count in held.items()}
            reserved[trial] = {node: count for node, count in left.items() if count > 0}
            room.take(reserved[trial])
        elif counts[trial] >= room.largest and room.fullest_fit(counts[trial], before) is None:
            placement, evicted = _whole_nodes(counts[trial], room, placed, before)
        else:
            placement = _on_one_node(counts[trial], room, before)
        placed[trial] = placement
        if evicted:
            todo[index:] = sorted([*todo[index:], *evicted], key=lambda name: -counts[name])
    for slots in reserved.values():
        room.give_back(slots)
    for trial in todo:
        if not placed[trial] and current.get(trial):
            # It made room for a large one, and would have to pause.
            placed[trial] = _on_one_node(counts[trial], room, current[trial])
    return {trial: placement for trial, placement in (whole | placed).items() if placement}


def part_of(held: Placement, count: int) -> dict[str, int]:
    """Return ``count`` of the slots that it holds, where it holds most; all if there are fewer."""
    part: dict[str, int] = {}
    for node in sorted(held, key=lambda name: -held[name]):
        taken = min(held[node], count - sum(part.values()))
        if taken > 0:
            part[node] = taken
    return part


class _Room:
    """Free slots by node, and the nodes by how many they have free."""

    def __init__(self, nodes: Iterable[NodeView]) -> None:
        self.sizes = {node.name: node.slots for node in nodes}
        self.free = dict(self.sizes)
        self.largest = max(self.sizes.values(), default=1)
        self._nodes_by_free_slots: list[dict[str, None]] = [{} for _ in range(self.largest + 1)]
        for node, size in self.sizes.items():
            self._nodes_by_free_slots[size][node] = None

    def has(self, placement: Placement) -> bool:
        return all(self.free.get(node, 0) >= count for node, count in placement.items())

    def take(self, placement: Placement) -> None:
        for node, count in placement.items():
            self._move(node, self.free[node] - count)

    def give_back(self, placement: Placement) -> None:
        for node, count in placement.items():
            self._move(node, self.free[node] + count)

    def _move(self, node: str, free: int) -> None:
        del self._nodes_by_free_slots[self.free[node]][node]
        self.free[node] = free
        self._nodes_by_free_slots[free][node] = None

    def fullest_fit(self, count: int, before: Placement) -> str | None:
        """Return the node that has the least room for so many, one that the trial is on if there are several."""
        for free in range(count, self.largest + 1):
            nodes = self._nodes_by_free_slots[free]
            if nodes:
                return next((node for node in before if node in nodes), next(iter(nodes)))
        return None

    def empty(self, wanted: int, before: Placement) -> list[str]:
        """Return at most ``wanted`` empty nodes of the largest size, those the trial is on first."""
        nodes = [node for node in self._nodes_by_free_slots[self.largest] if self.sizes[node] == self.largest]
        held = [
            node
            for node in before
            if node in self._nodes_by_free_slots[self.largest] and self.sizes[node] == self.largest
        ]
        return list(dict.fromkeys([*held, *nodes]))[:wanted]


def _from_where_it_is(count: int, room: _Room, held: Placement) -> dict[str, int]:
    """Place slots on as few nodes as can be, on those that are held before others; else also on the emptiest ones."""
    whole, rest = divmod(count, room.largest)
    chosen = room.empty(whole, held)
    placement = dict.fromkeys(chosen, room.largest)
    others = {node: count for node, count in held.items() if node not in placement}
    fitting = [node for node in others if room.free[node] >= rest]
    last = max(fitting, key=lambda node: others[node]) if fitting else None
    if len(chosen) == whole and rest:
        room.take(placement)
        last = last or room.fullest_fit(rest, others)
        room.give_back(placement)
        if last is not None:
            placement[last] = rest
    if sum(placement.values()) < count:
        placement = part_of(held, count)
        free = {node: slots - placement.get(node, 0) for node, slots in room.free.items()}
        more = emptiest_first(free, count - sum(placement.values()))
        placement = {node: placement.get(node, 0) + more.get(node, 0) for node in {**placement, **more}}
    room.take(placement)
    return placement


def _on_one_node(count: int, room: _Room, before: Placement) -> dict[str, int]:
    """Place slots on one node if it can be, else on the emptiest ones."""
    node = room.fullest_fit(count, before)
    placement = {node: count} if node is not None else emptiest_first(dict(room.free), count)
    room.take(placement)
    return placement


def _whole_nodes(
    count: int, room: _Room, placed: dict[str, Placement], before: Placement
) -> tuple[dict[str, int], list[str]]:
    """Return a large trial's nodes, and those who had to make room for it."""
    evicted: list[str] = []
    wanted = count // room.largest
    chosen = room.empty(wanted, before)
    while len(chosen) < wanted:
        node = _cheapest_to_empty(room, placed)
        if node is None:
            break
        for other in [name for name, places in placed.items() if node in places]:
            room.give_back(placed.pop(other))
            evicted.append(other)
        chosen.append(node)
    placement = dict.fromkeys(sorted(chosen), room.largest)
    room.take(placement)
    rest = count - sum(placement.values())
    if rest and len(chosen) in (0, wanted):
        placement.update(_on_one_node(rest, room, before))
    return placement, evicted


def _cheapest_to_empty(room: _Room, placed: Mapping[str, Placement]) -> str | None:
    """Return the node whose placed trials all lie on it alone, and are fewest; None when there is none."""
    trials_on: dict[str, int] = {}
    slots_on: dict[str, int] = {}
    for placement in placed.values():
        if len(placement) == 1:
            [(node, count)] = placement.items()
            if count < room.sizes[node]:
                trials_on[node] = trials_on.get(node, 0) + 1
                slots_on[node] = slots_on.get(node, 0) + count
    candidates = [
        node
        for node, count in slots_on.items()
        if room.sizes[node] == room.largest and count == room.sizes[node] - room.free[node]
    ]
    return min(candidates, key=lambda node: (trials_on[node], slots_on[node], node), default=None)
