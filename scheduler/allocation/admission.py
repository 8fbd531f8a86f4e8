"""Who may hold slots at all: budgets and quotas, then priorities, then weighted shares of the studies.

Only minimums are looked at; what is left over is the policy's to give. Nobody starves: a study that has no slots gains
a level of priority for each hour that it has waited, and shares come round by weight.
"""

from __future__ import annotations

from collections.abc import Sequence

from scheduler.snapshot import TrialView

AGING_SECONDS = 3600.0


def not_admitted(views: Sequence[TrialView], total: int, now: float, *, by_share: bool) -> dict[str, str]:
    """Trials that get nothing now, each with the reason.

    ``by_share``: between studies of one priority, slots go by weight; else the policy decides among them.
    """
    refused = _beyond_quota(views) | {
        view.trial_id: "its study's budget of slot-hours is used"
        for view in views
        if view.budget_left is not None and view.budget_left <= 0.0
    }
    left = [view for view in views if view.trial_id not in refused and view.min_replicas <= total]
    if sum(view.min_replicas for view in left) <= total:
        return refused
    by_study = _levels(left, now)
    levels = {view.trial_id: by_study[view.study] for view in left}
    by_share = by_share and len({view.study for view in left}) > 1
    if not by_share and len({view.study_priority for view in left}) == 1:
        return refused
    room = total
    for current in sorted(set(levels.values()), reverse=True):
        queue = [view for view in left if levels[view.trial_id] == current]
        for view in _by_share(queue) if by_share else _in_order(queue):
            if view.min_replicas <= room:
                room -= view.min_replicas
            elif current < max(levels.values()):
                refused[view.trial_id] = "waits for trials of studies with a higher priority"
            else:
                refused[view.trial_id] = "its study has its share of the slots, and others wait for theirs"
    return refused


def _levels(views: Sequence[TrialView], now: float) -> dict[str, int]:
    """Each study's priority, and one more for each hour that it has waited without having any slots."""
    levels = {view.study: view.study_priority for view in views}
    served = {view.study for view in views if view.held_slots}
    for study in levels.keys() - served:
        waited = now - min(
            view.submitted_at + view.attained_slot_seconds / view.min_replicas for view in views if view.study == study
        )
        levels[study] += int(max(0.0, waited) // AGING_SECONDS)
    return levels


def _beyond_quota(views: Sequence[TrialView]) -> dict[str, str]:
    used: dict[str, int] = {}
    refused = {}
    for view in _in_order(views):
        if view.study_quota is None:
            continue
        if used.get(view.study, 0) + view.min_replicas > view.study_quota:
            refused[view.trial_id] = f"its study's quota of {view.study_quota} slots is used"
        else:
            used[view.study] = used.get(view.study, 0) + view.min_replicas
    return refused


def _in_order(views: Sequence[TrialView]) -> list[TrialView]:
    """Those that run first, then the most promising, then by submission."""
    return sorted(views, key=lambda view: (not view.held_slots, -view.promise, view.submitted_at, view.trial_id))


def _by_share(views: Sequence[TrialView]) -> list[TrialView]:
    """In turn: always the next trial of the study that has had least for its weight."""
    queues: dict[str, list[TrialView]] = {}
    for view in reversed(_in_order(views)):
        queues.setdefault(view.study, []).append(view)
    given = dict.fromkeys(queues, 0)
    order = []
    while queues:
        study = min(queues, key=lambda name: (_share(queues[name][-1], given[name]), name))
        view = queues[study].pop()
        given[study] += view.min_replicas
        order.append(view)
        if not queues[study]:
            del queues[study]
    return order


def _share(view: TrialView, given: int) -> float:
    return (given + view.min_replicas) / view.study_weight
