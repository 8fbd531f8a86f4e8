"""Nodes that are alike, and which trials may use them.

A trial's replicas step together, so it runs on nodes of one kind at a time (as in Sia, SOSP'23): a cluster with several
kinds, reservations or pinned trials falls into groups, each a cluster of equal nodes for itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from scheduler.snapshot import NodeView, Snapshot, TrialView


@dataclass(frozen=True, slots=True)
class NodeGroup:
    kind: str
    nodes: tuple[NodeView, ...]
    names: frozenset[str]

    @property
    def slots(self) -> int:
        return sum(node.slots for node in self.nodes)

    @property
    def node_slots(self) -> int:
        """Slots of the largest node; at least 1."""
        return max((1, *(node.slots for node in self.nodes)))

    def held_by(self, view: TrialView) -> int:
        """Slots that a trial holds here."""
        return sum(count for node, count in view.placement.items() if node in self.names)


def node_groups(nodes: Sequence[NodeView], views: Iterable[TrialView]) -> list[NodeGroup]:
    """Nodes of the same kind that the same studies and the same pinned trials may use; in order of appearance."""
    pins = list(dict.fromkeys(view.only_on for view in views if view.only_on))
    alike: dict[tuple[object, ...], list[NodeView]] = {}
    for node in nodes:
        chosen_by = tuple(node.name in pin or node.kind in pin for pin in pins)
        alike.setdefault((node.kind, frozenset(node.reserved_for), chosen_by), []).append(node)
    return [
        NodeGroup(members[0].kind, tuple(members), frozenset(node.name for node in members))
        for members in alike.values()
    ]


def may_use(view: TrialView, group: NodeGroup) -> bool:
    """Tell whether the group's nodes are open to the trial's study, and among those it is pinned to."""
    node = group.nodes[0]
    open_to = not node.reserved_for or (view.study_title or view.study) in node.reserved_for
    return open_to and (not view.only_on or node.name in view.only_on or node.kind in view.only_on)


def assign_by_room(snapshot: Snapshot, views: Sequence[TrialView], groups: Sequence[NodeGroup]) -> Mapping[str, int]:
    """Keep each trial in its group; send others, in order of submission, where most slots are left for each trial."""
    left = [float(group.slots) for group in groups]
    group_of: dict[str, int] = {}
    for view in sorted(views, key=lambda view: (not view.held_slots, view.submitted_at, view.trial_id)):
        allowed = [index for index, group in enumerate(groups) if may_use(view, group)]
        if not allowed:
            continue
        held = [index for index in allowed if groups[index].held_by(view)]
        index = max(held or allowed, key=lambda index: (groups[index].held_by(view), left[index]))
        left[index] -= max(view.min_slots, view.held_slots)
        group_of[view.trial_id] = index
    return group_of
