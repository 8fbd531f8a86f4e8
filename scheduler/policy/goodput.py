"""The default policy: slots go where they save most completion time, and move only when that pays.

Each decision maximises, over the numbers of slots k_j that the trials may have,

    sum_j  gain_j(speed_j(k_j)) x kept_j(k_j)

where speed_j(k) is the trial's goodput with k slots relative to one slot, by its study's profile (Pollux, OSDI'21,
eq. 6 and 14), and kept_j(k) is what a change from the present number leaves of it after its pause. What a speed gains
depends on the study's goal (``allocation.goals``); for the mean completion time it is the price of the trial's
remaining work (``allocation.completion``), times what it is promised within its study, times the study's weight, times
the speed. Every trial's minimum comes first, running ones before waiting ones; while one waits, others shrink to let it
in and nobody grows. Only where a study is in a hurry for its best result, promising trials may grow while others of it
wait. Counts are then packed onto nodes, trials that keep their count stay.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final

import numpy as np

from dist_core.layout import Layout
from scheduler.allocation.counts import choose_counts
from scheduler.allocation.grants import slots, waits
from scheduler.allocation.groups import NodeGroup, assign_by_room, may_use
from scheduler.allocation.options import choose_options
from scheduler.allocation.placement import free_slots, held_by, packed
from scheduler.policy.goodput_table import ONE, GoodputTable, is_rooted, is_usable
from scheduler.snapshot import Grant, LayoutOption, Placement, Snapshot, TrialView
from trials.record import Reason

MOST_ASSIGNED = 300
"""Trials up to which groups of nodes are assigned by an integer programme; it takes about a second there."""
MOST_PLACED = 4
"""Times that counts are chosen anew, with the speeds of those that are to be had on more nodes than they need only."""


class GoodputPolicy:
    name: Final = "goodput"

    def allocate(self, snapshot: Snapshot) -> dict[str, Grant]:
        node_slots = snapshot.largest_node
        eligible = [_usable(view, node_slots) for view in [*snapshot.eligible, *snapshot.coming]]
        table = GoodputTable(eligible, snapshot)
        placed = self._placed(table, eligible, snapshot)
        for _ in range(MOST_PLACED):
            # Slots there are, and no node with as many: another layout may do with what is free.
            homeless = [
                row
                for row, view in enumerate(eligible)
                if len(view.options) > 1 and table.chosen_counts[row] and not placed.get(view.trial_id)
            ]
            if not table.leave_out(homeless):
                break
            placed = self._placed(table, eligible, snapshot)
        for _ in range(MOST_PLACED):
            room = free_slots(snapshot.nodes, placed.values())
            spread = {
                row: (max(count + room.get(node, 0) for node, count in placement.items()), len(placement))
                for row, view in enumerate(eligible)
                if _is_spread(placement := placed.get(view.trial_id, {}), view, node_slots)
            }
            if not table.learn_spread(spread):
                break
            placed = self._placed(table, eligible, snapshot)
        grants: dict[str, Grant] = {}
        free = snapshot.total_slots - sum(sum(placement.values()) for placement in placed.values())
        starts = any(view.held_slots == 0 and placed.get(view.trial_id) for view in eligible)
        rows = {view.trial_id: row for row, view in enumerate(eligible)}
        for view in snapshot.trials:
            placement = placed.get(view.trial_id, {})
            row = rows.get(view.trial_id)
            option = view.option() if row is None else table.option(row, sum(placement.values()))
            if sum(placement.values()) < option.min_slots:
                placement = {}
            reason = self._reason(view, placement, option, table, row, snapshot, free, starts=starts)
            numbers = {} if row is None else table.numbers(row, view, sum(placement.values()))
            layout = option.layout if view.options and placement else ""
            grants[view.trial_id] = Grant(placement=placement, reason=reason, layout=layout, numbers=numbers)
        return grants

    def _placed(self, table: GoodputTable, views: Sequence[TrialView], snapshot: Snapshot) -> dict[str, Placement]:
        chosen = table.counts[choose_counts(table.counts, table.values, snapshot.total_slots)]
        if any(not count for count in chosen[~table.hurried]):
            # Somebody waits for more than is free: what others took now would have to be taken back from them.
            chosen = table.counts[choose_counts(table.counts, table.without_growth(), snapshot.total_slots)]
        table.chosen_counts = [int(count) for count in chosen]
        counts = {view.trial_id: count for view, count in zip(views, table.chosen_counts, strict=True)}
        left_alone = {view.trial_id for view, alone in zip(views, table.left_alone, strict=True) if alone}
        rooted = {view.trial_id for view in views if is_rooted(view)}
        sizes = {
            view.trial_id: table.option(row, counts[view.trial_id]).slots_per_replica for row, view in enumerate(views)
        }
        large = {trial: size for trial, size in sizes.items() if size > 1}
        return packed(counts, snapshot.nodes, held_by(views), left_alone=left_alone, rooted=rooted, sizes=large)

    def _reason(
        self,
        view: TrialView,
        placement: Placement,
        option: LayoutOption,
        table: GoodputTable,
        row: int | None,
        snapshot: Snapshot,
        free: int,
        *,
        starts: bool,
    ) -> Reason:
        if row is None:
            return Reason(code="held", sentence=view.held or "")
        before, after = view.held_slots, sum(placement.values())
        if after == 0:
            return waits(view, snapshot, free)
        if before == 0:
            as_what = f", {_words(option.layout)}" if view.options else ""
            return Reason(code="started", sentence=f"starts on {slots(after)}{as_what}")
        if view.options and option.layout != view.layout:
            return self._other_layout(view, option, table, row, after)
        if after == before:
            moves = dict(placement) != {node: count for node, count in view.placement.items() if count}
            return Reason(code="moved" if moves else "unchanged", sentence=f"keeps {slots(after)}")
        change = f"predicted goodput x{table.speed(row, after) / max(table.speed(row, before), 1e-12):.2f}"
        story = f"{change}; promise {view.promise:.2f} ({view.rank_sentence})"
        if after > before:
            return Reason(code="goodput_gain", sentence=f"{slots(after - before)} more; {story}")
        if not starts and table.speed(row, after) >= table.speed(row, before):
            return Reason(
                code="slower_than_predicted",
                sentence=f"{slots(before)} run slower than predicted; back to {slots(after)}; {story}",
            )
        cause = "makes room for a waiting trial" if starts else f"other trials gain more from {slots(before - after)}"
        return Reason(code="gives_way", sentence=f"{cause}; {story}")

    @staticmethod
    def _other_layout(view: TrialView, option: LayoutOption, table: GoodputTable, row: int, after: int) -> Reason:
        why = "the old one is not needed, or does not fit into memory"
        if any(each.layout == view.layout for each in view.options):
            change = table.speed(row, after) / max(table.speed_before(row, view), 1e-12)
            why = f"predicted goodput x{change:.2f}"
        sentence = f"changes its layout from {_words(view.layout)} to {_words(option.layout)}, on {slots(after)}: {why}"
        return Reason(code="other_layout", sentence=sentence)


def assign_by_goodput(snapshot: Snapshot, views: Sequence[TrialView], groups: Sequence[NodeGroup]) -> Mapping[str, int]:
    """Return the group of nodes that each trial is worth most on, when all groups are divided at once.

    Where a trial is, it has no change to pay for. Too many trials for the integer programme are assigned by room.
    """
    if len(views) > MOST_ASSIGNED or not views:
        return assign_by_room(snapshot, views, groups)
    tables = []
    alone = np.ones((len(views), len(groups)))
    for index, group in enumerate(groups):
        mine = [_on_group(view, group) for view in views]
        tables.append(GoodputTable(mine, replace(snapshot, nodes=group.nodes, trials=tuple(mine))))
        alone[:, index] = [1.0 if v.model is None else float(v.model.curve(group.node_slots, ONE)[0]) for v in mine]
    alone /= alone.max(axis=1, keepdims=True)
    allowed = np.array([[may_use(view, group) for group in groups] for view in views])
    gains = [
        np.where(
            allowed[:, [index]] & np.isfinite(table.values), np.maximum(table.gains * alone[:, [index]], 1e-9), -np.inf
        )[:, 1:]
        for index, table in enumerate(tables)
    ]
    values = np.concatenate(gains, axis=1)
    # Everybody's minimum comes before anybody's growth.
    values += float(values[np.isfinite(values)].max(initial=1.0)) * len(views)
    counts = np.concatenate([table.counts[1:] for table in tables])
    group_of = np.repeat(np.arange(len(groups)), [len(table.counts) - 1 for table in tables])
    capacity = np.array([group.slots for group in groups])
    chosen = choose_options(values, counts, group_of, capacity)
    assigned: dict[str, int] = {}
    for row, view in enumerate(views):
        if chosen[row] >= 0:
            assigned[view.trial_id] = int(group_of[chosen[row]])
        elif allowed[row].any():
            assigned[view.trial_id] = max(
                np.flatnonzero(allowed[row]).tolist(), key=lambda index: groups[index].held_by(view)
            )
    return assigned


def _on_group(view: TrialView, group: NodeGroup) -> TrialView:
    """Return the trial as that group alone sees it."""
    held = {node: count for node, count in view.placement.items() if node in group.names}
    return _usable(replace(view.on_kind(group.kind), placement=held), group.node_slots)


def _words(layout: str) -> str:
    return Layout.from_name(layout).words if layout else "the code's own layout"


def _usable(view: TrialView, node_slots: int) -> TrialView:
    """Return the trial without models that say nothing."""
    if view.options:
        known = [each for each in view.options if is_usable(each.model, node_slots)]
        if known:
            return replace(view, options=tuple(known), model=replace(view, options=tuple(known)).option().model)
        return replace(view.with_option(view.option()), model=None)
    return view if is_usable(view.model, node_slots) else replace(view, model=None)


def _is_spread(placement: Placement, view: TrialView, node_slots: int) -> bool:
    """Tell whether growth would spread it over more nodes than needed: counts are chosen as if few nodes had room."""
    if view.model is None or len(view.options) > 1 or not is_rooted(view):
        return False
    count = sum(placement.values())
    return count > view.held_slots > 0 and len(placement) > -(-count // node_slots)
