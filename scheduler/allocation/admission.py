"""Admission to slots: budgets and quotas, then priorities, then weighted shares of the studies.

Only minimums are looked at; what is left over is the policy's to give. Nobody starves: for each hour that a study has
waited in vain, one trial of it gains a level of priority, which it keeps while it runs; shares come round by weight.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence, Set

from scheduler.allocation.groups import NodeGroup, may_use
from scheduler.snapshot import TrialView

AGING_SECONDS = 3600.0
BUDGET_USED = "its study's budget of slot-hours is used up"


def not_admitted(
    views: Sequence[TrialView],
    groups: Sequence[NodeGroup],
    now: float,
    *,
    by_share: bool,
    served: Set[str] = frozenset(),
) -> dict[str, str]:
    """Trials that get nothing now, each with the reason.

    ``by_share``: between studies of one priority, slots go by weight; else the policy decides among them. ``served``:
    studies that have trials elsewhere, which keep their slots.
    """
    refused = _beyond_quota(views) | {
        view.trial_id: BUDGET_USED for view in views if view.budget_left is not None and view.budget_left <= 0.0
    }
    open_to = {
        view.trial_id: [index for index, group in enumerate(groups) if may_use(view, group)]
        for view in views
        if view.trial_id not in refused
    }
    sizes = [group.slots for group in groups]
    left = [
        view
        for view in views
        if view.trial_id not in refused
        and view.min_slots <= max((sizes[index] for index in open_to[view.trial_id]), default=0)
    ]
    if len(groups) == 1 and sum(view.min_slots for view in left) <= sizes[0]:
        return refused
    levels = _levels(left, now, served)
    by_share = by_share and len({view.study for view in left}) > 1
    if not by_share and len({view.study_priority for view in left}) == 1:
        return refused
    room = list(sizes)
    wanted = Counter(index for view in left for index in open_to[view.trial_id])
    for current in sorted(set(levels.values()), reverse=True):
        queue = [view for view in left if levels[view.trial_id] == current]
        for view in _by_share(queue) if by_share else _in_order(queue):
            fitting = [index for index in open_to[view.trial_id] if view.min_slots <= room[index]]
            # Where it is; else where the fewest others could go instead.
            chosen = max(
                fitting or open_to[view.trial_id],
                key=lambda index: (groups[index].held_by(view) if fitting else 0, -wanted[index], room[index]),
            )
            if view.min_slots <= room[chosen]:
                room[chosen] -= view.min_slots
            elif current < max(levels.values()):
                refused[view.trial_id] = "waits for trials of studies with a higher priority"
            else:
                refused[view.trial_id] = (
                    "its study already has its share of the slots, and other studies are waiting for theirs"
                )
    return refused


def _levels(views: Sequence[TrialView], now: float, served: Set[str]) -> dict[str, int]:
    """Return each trial's priority: its study's, plus one level an hour of waiting for the trial whose turn it is."""
    levels = {view.trial_id: view.study_priority for view in views}
    by_study: dict[str, list[TrialView]] = {}
    for view in views:
        by_study.setdefault(view.study, []).append(view)
    for study, views_of_study in by_study.items():
        if study in served:
            continue
        # The time it has spent without slots; it stands still while it runs, so a trial keeps what it has gained.
        first = min(views_of_study, key=lambda view: (not view.held_slots, _waiting_since(view), view.trial_id))
        levels[first.trial_id] += int(max(0.0, now - _waiting_since(first)) // AGING_SECONDS)
    return levels


def _waiting_since(view: TrialView) -> float:
    return view.submitted_at + view.served_seconds


def _beyond_quota(views: Sequence[TrialView]) -> dict[str, str]:
    used: dict[str, int] = {}
    refused = {}
    # What cannot be resized now keeps what it has, so it counts before anybody else.
    for view in sorted(_in_order(views), key=lambda view: least_slots(view) == view.min_slots):
        full = [quota for quota in view.quotas if used.get(quota.name, 0) + view.min_slots > quota.slots]
        if full:
            refused[view.trial_id] = full[0].sentence
            continue
        for quota in view.quotas:
            used[quota.name] = used.get(quota.name, 0) + least_slots(view)
    return refused


def least_slots(view: TrialView) -> int:
    """Return the least slots it will hold once admitted: a trial that cannot be resized now keeps what it has."""
    return view.min_slots if view.can_rescale else max(view.min_slots, view.held_slots)


def _in_order(views: Sequence[TrialView]) -> list[TrialView]:
    """Sort running trials first, then the most promising, then by submission."""
    return sorted(views, key=lambda view: (not view.held_slots, -view.promise, view.submitted_at, view.trial_id))


def _by_share(views: Sequence[TrialView]) -> list[TrialView]:
    """Sort in turn: always the next trial of the study that has had least for its weight."""
    queues: dict[str, list[TrialView]] = {}
    for view in reversed(_in_order(views)):
        queues.setdefault(view.study, []).append(view)
    slots_given = dict.fromkeys(queues, 0)
    order = []
    while queues:
        study = min(queues, key=lambda name: (_share(queues[name][-1], slots_given[name]), name))
        view = queues[study].pop()
        slots_given[study] += view.min_slots
        order.append(view)
        if not queues[study]:
            del queues[study]
    return order


def _share(view: TrialView, given: int) -> float:
    return (given + view.min_slots) / view.study_weight
