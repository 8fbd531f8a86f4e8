"""Sia (Jayaram Subramanya et al., SOSP'23): goodput on several kinds of nodes, as an integer programme.

A trial chooses among (kind, count): powers of two within a node, whole nodes beyond. Its goodput on each, relative to
its least, enters with the power p = -0.5 (the paper's choice), a change of allocation with the part of its age that
restarts have left it, and having nothing costs ``NOTHING``. A trial starts on its minimum and at most doubles.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from scheduler.allocation.grants import grants_for
from scheduler.allocation.groups import NodeGroup, may_use
from scheduler.allocation.options import choose_options
from scheduler.allocation.placement import held_by, packed
from scheduler.snapshot import Grant, Snapshot, TrialView

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]

POWER = -0.5
NOTHING = 2.1
"""Cost of having no slots; that of the least allocation is 1. With the paper's 1.1 trials wait while others grow."""
MOST_NODES = 16


class SiaPolicy:
    name: Final = "sia"

    def allocate(self, snapshot: Snapshot) -> dict[str, Grant]:
        eligible = snapshot.eligible
        nodes = tuple(snapshot.nodes)
        groups = [NodeGroup("", nodes, frozenset(node.name for node in nodes))] if nodes else []
        options = _Options(snapshot, eligible, groups)
        wanted = {view.trial_id: options.count_of(row) for row, view in enumerate(eligible)}
        placed = packed(wanted, snapshot.nodes, held_by(eligible))
        return grants_for(snapshot, placed, code="integer_programme", why="the best sum of goodputs to the power -0.5")


def assign_by_programme(
    snapshot: Snapshot, views: Sequence[TrialView], groups: Sequence[NodeGroup]
) -> Mapping[str, int]:
    """Return the group of nodes that the programme over all of them puts each trial into.

    A trial that the programme leaves out stays in its group.
    """
    options = _Options(snapshot, views, groups)
    assigned: dict[str, int] = {}
    for row, view in enumerate(views):
        allowed = [index for index, group in enumerate(groups) if may_use(view, group)]
        chosen = int(options.chosen[row])
        if chosen >= 0:
            assigned[view.trial_id] = int(options.group[chosen])
        elif allowed:
            assigned[view.trial_id] = max(allowed, key=lambda index: groups[index].held_by(view))
    return assigned


class _Options:
    def __init__(self, snapshot: Snapshot, views: Sequence[TrialView], groups: Sequence[NodeGroup]) -> None:
        sizes = [_sizes(group, views) for group in groups]
        self.slots = np.concatenate([*sizes, np.zeros(0, dtype=np.int64)]).astype(np.int64)
        self.group = np.repeat(np.arange(len(groups)), [len(each) for each in sizes])
        values = np.array([self._values(view, snapshot, groups, sizes) for view in views])
        capacity = np.array([group.slots for group in groups], dtype=np.int64)
        self.chosen = choose_options(values.reshape(len(views), len(self.slots)), self.slots, self.group, capacity)

    def count_of(self, row: int) -> int:
        return int(self.slots[self.chosen[row]]) if self.chosen[row] >= 0 else 0

    @staticmethod
    def _values(view: TrialView, snapshot: Snapshot, groups: Sequence[NodeGroup], sizes: Sequence[Integers]) -> Floats:
        """Cost of having nothing minus cost of each option."""
        age = max(0.0, snapshot.now - view.submitted_at)
        left = max(age - view.num_rescales * view.pause_seconds, 0.0) / (age + view.pause_seconds + 1e-9)
        speeds, allowed, kept = [], [], []
        for group, counts in zip(groups, sizes, strict=True):
            held = group.held_by(view)
            if view.model is None:
                speeds.append(counts / max(1, view.min_slots))
            else:
                model = view.model.on(group.kind) if group.kind else view.model
                speeds.append(model.curve(group.node_slots, counts))
            most = min(view.max_slots, 2 * view.held_slots if view.held_slots else view.min_slots)
            open_to = may_use(view, group)
            fits = (counts >= view.min_slots) & (counts <= max(most, view.min_slots)) & open_to
            same = (counts == held) & open_to & (held > 0) & (held >= view.min_slots) & (held <= view.max_slots)
            allowed.append(same if view.held_slots and not view.can_rescale else fits | same)
            kept.append(np.where(same | (view.held_slots == 0), 1.0, left))
        speed, mask = np.concatenate(speeds), np.concatenate(allowed)
        if not mask.any():
            return np.full(len(speed), -np.inf)
        normal = speed * np.concatenate(kept) / speed[mask].min()
        values = NOTHING - np.maximum(normal, 1e-3) ** POWER
        # A restart that would leave less than nothing is still better than no slots.
        return np.asarray(np.where(mask, np.maximum(values, 1e-3), -np.inf))


def _sizes(group: NodeGroup, views: Sequence[TrialView]) -> Integers:
    within = group.node_slots
    sizes = {1 << power for power in range(within.bit_length()) if 1 << power <= within}
    sizes.update(within * nodes for nodes in range(1, min(len(group.nodes), MOST_NODES) + 1))
    for view in views:
        sizes.update((view.min_slots, group.held_by(view)))
    return np.array(sorted(size for size in sizes if 0 < size <= group.slots), dtype=np.int64)
