"""Constraints of every policy: kinds of nodes, reservations, pinned and non-preemptible trials, quotas, priorities.

A policy itself divides equal nodes among trials that may all use them. Around it, trials that keep what they have are
set aside, those that are not admitted are held, the others are assigned to a group of equal nodes each, and the policy
divides every group. Where a quota is exceeded, the trials that share it are capped and the groups divided again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Protocol

from scheduler.allocation.admission import least_slots, not_admitted
from scheduler.allocation.grants import slots, waits
from scheduler.allocation.groups import NodeGroup, assign_by_room, node_groups
from scheduler.allocation.whole_replicas import in_whole_replicas
from scheduler.snapshot import Grant, Policy, Snapshot, TrialView
from trials.record import Reason


class Assigns(Protocol):
    def __call__(
        self, snapshot: Snapshot, views: Sequence[TrialView], groups: Sequence[NodeGroup]
    ) -> Mapping[str, int]:
        """Return the group of each trial, by index; one that may use none has no entry."""
        ...


class ConstrainedPolicy:
    def __init__(
        self,
        inner: Policy,
        *,
        assign: Assigns = assign_by_room,
        by_share: bool = False,
        chooses_layouts: bool = False,
    ) -> None:
        """``by_share``: minimums of studies that compete go by their weights. ``chooses_layouts``: the policy does."""
        self.inner = inner
        self.name = inner.name
        self._assign = assign
        self._by_share = by_share
        self._chooses_layouts = chooses_layouts

    def allocate(self, snapshot: Snapshot) -> dict[str, Grant]:
        snapshot = replace(snapshot, nodes=tuple(node for node in snapshot.nodes if node.slots > 0))
        if not self._chooses_layouts:
            snapshot = _as_they_are(snapshot)
        everybody = snapshot.trials
        kept, snapshot = _set_aside(snapshot)
        groups = node_groups(snapshot.nodes, snapshot.trials)
        if not groups:
            return kept | {
                view.trial_id: Grant(placement={}, reason=_without_nodes(view, snapshot, kept=bool(kept)))
                for view in snapshot.trials
            }
        served = {view.study for view in everybody if view.trial_id in kept}
        candidates = [*snapshot.eligible, *snapshot.coming]
        refused = not_admitted(candidates, groups, snapshot.now, by_share=self._by_share, served=served)
        snapshot = _held(snapshot, refused)
        open_to_all = not any(view.only_on for view in snapshot.trials) and not any(
            group.nodes[0].reserved_for for group in groups
        )
        if len(groups) > 1 or not open_to_all:
            grants = self._in_groups(snapshot, groups)
        else:
            grants = self._divide(snapshot, groups)
        return _with_layouts(snapshot, in_whole_replicas(snapshot, grants)) | kept

    def _divide(self, snapshot: Snapshot, groups: Sequence[NodeGroup]) -> dict[str, Grant]:
        kind = groups[0].kind
        grants = self.inner.allocate(_on_kind(snapshot, kind))
        caps = _over_quota(snapshot.trials, grants)
        return self.inner.allocate(_on_kind(_capped(snapshot, caps), kind)) if caps else grants

    def _in_groups(self, snapshot: Snapshot, groups: Sequence[NodeGroup]) -> dict[str, Grant]:
        eligible = snapshot.eligible
        assigned = self._assign(snapshot, [*eligible, *snapshot.coming], groups)
        homeless = {
            view.trial_id: "no node may run it: all are reserved for other studies, or it is pinned elsewhere"
            for view in eligible
            if view.trial_id not in assigned
        }
        snapshot = _held(snapshot, homeless)
        grants = self._group_by_group(snapshot, groups, assigned)
        caps = _over_quota(snapshot.trials, grants)
        return self._group_by_group(_capped(snapshot, caps), groups, assigned) if caps else grants

    def _group_by_group(
        self, snapshot: Snapshot, groups: Sequence[NodeGroup], assigned: Mapping[str, int]
    ) -> dict[str, Grant]:
        grants: dict[str, Grant] = {}
        for index, group in enumerate(groups):
            mine = tuple(view for view in snapshot.trials if assigned.get(view.trial_id, 0) == index)
            coming = tuple(view for view in snapshot.coming if assigned.get(view.trial_id) == index)
            part = replace(snapshot, nodes=group.nodes, trials=mine, coming=coming)
            grants |= self.inner.allocate(_on_kind(part, group.kind))
        return grants


def _as_they_are(snapshot: Snapshot) -> Snapshot:
    """Set each trial's layout to the present one or its first option, for a policy that chooses none."""
    trials, coming = (
        tuple(view.with_option(view.option()) for view in views) for views in (snapshot.trials, snapshot.coming)
    )
    return replace(snapshot, trials=trials, coming=coming)


def _with_layouts(snapshot: Snapshot, grants: Mapping[str, Grant]) -> dict[str, Grant]:
    """Add the remaining layout to grants of a policy that has not named one."""
    only = {view.trial_id: view.option().layout for view in snapshot.trials if view.options}
    return {
        trial: replace(grant, layout=only[trial]) if trial in only and not grant.layout else grant
        for trial, grant in grants.items()
    }


def _set_aside(snapshot: Snapshot) -> tuple[dict[str, Grant], Snapshot]:
    """Grants of running trials that may not be preempted, and the snapshot without them and their slots."""
    room = {node.name: node.slots for node in snapshot.nodes}
    kept: dict[str, Grant] = {}
    used: dict[str, int] = {}
    for view in snapshot.eligible:
        within = view.options or view.min_slots <= view.held_slots <= view.max_slots
        if view.preemptible or not view.held_slots or not within:
            continue
        if any(count > room.get(node, 0) for node, count in view.placement.items()):
            # Its node is gone or has become smaller.
            continue
        sentence = f"keeps {slots(view.held_slots)}: it cannot be preempted"
        kept[view.trial_id] = Grant(placement=view.placement, reason=Reason(code="not_preemptible", sentence=sentence))
        for node, count in view.placement.items():
            room[node] -= count
        for quota in view.quotas:
            used[quota.name] = used.get(quota.name, 0) + view.held_slots
    if not kept:
        return kept, snapshot
    largest: dict[str, int] = {}
    for each in snapshot.nodes:
        largest[each.kind] = max(each.slots, largest.get(each.kind, 0))
    nodes = [replace(node, slots=room[node.name], whole=largest[node.kind]) for node in snapshot.nodes]
    return kept, replace(
        snapshot,
        nodes=tuple(node for node in nodes if node.slots > 0),
        trials=tuple(
            replace(
                view,
                quotas=tuple(replace(each, slots=max(0, each.slots - used.get(each.name, 0))) for each in view.quotas),
            )
            for view in snapshot.trials
            if view.trial_id not in kept
        ),
    )


def _without_nodes(view: TrialView, snapshot: Snapshot, *, kept: bool) -> Reason:
    """Why a trial waits where no slot is left; ``kept``: others hold theirs to their end."""
    if view.held is None and snapshot.queued:
        return waits(view, snapshot, 0)
    full = "all slots are held by trials that cannot be preempted" if kept else "other trials use all nodes"
    return Reason(code="held", sentence=view.held or full)


def _held(snapshot: Snapshot, reasons: Mapping[str, str]) -> Snapshot:
    if not reasons:
        return snapshot
    trials = tuple(replace(view, held=reasons.get(view.trial_id, view.held)) for view in snapshot.trials)
    coming = tuple(view for view in snapshot.coming if view.trial_id not in reasons)
    return replace(snapshot, trials=trials, coming=coming)


def _capped(snapshot: Snapshot, caps: Mapping[str, int]) -> Snapshot:
    trials = tuple(_with_most(view, caps.get(view.trial_id, view.max_slots)) for view in snapshot.trials)
    return replace(snapshot, trials=trials)


def _with_most(view: TrialView, most: int) -> TrialView:
    options = tuple(
        replace(each, max_slots=min(each.max_slots, most)) for each in view.options if each.min_slots <= most
    )
    return replace(view, max_slots=most, options=options)


def _on_kind(snapshot: Snapshot, kind: str) -> Snapshot:
    """Return the snapshot with each trial's model for nodes of that kind."""
    if all(view.model is None or view.model.kind == kind for view in [*snapshot.trials, *snapshot.coming]):
        return snapshot
    trials, coming = (tuple(view.on_kind(kind) for view in views) for views in (snapshot.trials, snapshot.coming))
    return replace(snapshot, trials=trials, coming=coming)


def _over_quota(views: Sequence[TrialView], grants: Mapping[str, Grant]) -> dict[str, int]:
    """Largest counts for trials that were granted more than a quota that they share: the largest ones give."""
    caps: dict[str, int] = {}
    sharing: dict[str, list[TrialView]] = {}
    limits: dict[str, int] = {}
    for view in sorted(views, key=lambda view: view.trial_id):
        for quota in () if view.held else view.quotas:
            sharing.setdefault(quota.name, []).append(view)
            limits[quota.name] = quota.slots
    for name, mine in sorted(sharing.items()):
        least = {view.trial_id: least_slots(view) for view in mine}
        sizes = {view.trial_id: view.option(grants[view.trial_id].layout).slots_per_replica for view in mine}
        counts = {trial: min(grants[trial].slots, caps.get(trial, grants[trial].slots)) for trial in least}
        if sum(counts.values()) <= limits[name]:
            continue
        counts = {trial: max(count, least[trial]) for trial, count in counts.items()}
        while sum(counts.values()) > limits[name]:
            reducible = [trial for trial, count in counts.items() if count > least[trial]]
            if not reducible:
                break
            largest = max(reducible, key=lambda trial: counts[trial])
            counts[largest] = max(least[largest], counts[largest] - sizes[largest])
        caps |= counts
    return caps
