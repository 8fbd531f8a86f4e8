"""Everything a policy may know at one moment, as plain values. Policies see this and nothing else."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from dist_core.goodput import BatchBounds
from trials.record import QueuedSlots, Reason, SlotQuota
from trials.terms import Goal

Placement = Mapping[str, int]
"""node -> slots."""


class SpeedModel(Protocol):
    """A trial's goodput by allocation, in examples at the initial batch size a second."""

    @property
    def kind(self) -> str:
        """Return the kind of the nodes that it speaks of."""
        ...

    def on(self, kind: str) -> SpeedModel:
        """Return the model of the same trial on nodes of that kind."""
        ...

    @property
    def bounds(self) -> BatchBounds: ...

    @property
    def most_profiled(self) -> int:
        """Largest number of slots that the model was fitted to."""
        ...

    @property
    def most_useful(self) -> float:
        """Slots beyond which its batch bounds leave nothing to do."""
        ...

    def curve(self, node_slots: int, counts: NDArray[np.int64]) -> NDArray[np.float64]:
        """Now, of allocations packed onto nodes of that size."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeView:
    name: str
    slots: int
    kind: str = ""
    """Kind of its slots, where they are not all alike: a GPU's model, or a part of one."""
    reserved_for: tuple[str, ...] = ()
    """Studies that alone may use it; empty: all may."""
    given_by: str = ""
    """Job of a queue that it came with, for people."""
    whole: int = 0
    """Slots of the largest node of its kind, where some are set aside and nodes are what is left of them."""

    @property
    def largest_alike(self) -> int:
        """A replica that takes more slots goes over several nodes."""
        return max(self.whole, self.slots)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutOption:
    """One way in which a trial's replicas may hold its model (``dist_core.layout``)."""

    layout: str
    slots_per_replica: int
    min_slots: int
    max_slots: int
    model: SpeedModel | None


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialView:
    """A trial as a policy sees it: what it was asked for, what it has, how fast it is and how it does."""

    trial_id: str
    study: str
    study_title: str = ""
    """Name of its study for people, where that is another one."""
    min_slots: int
    max_slots: int
    slots_per_replica: int = 1
    """It takes whole replicas: on one node, where that is large enough."""
    layout: str = ""
    """Layout that it trains with, where that is a choice."""
    options: tuple[LayoutOption, ...] = ()
    """Layouts to choose from, empty where there is no choice. Bounds are then those of all of them together, and
    ``slots_per_replica`` and ``model`` those of the present one, or of the first."""
    placement: Placement = field(default_factory=dict)
    """Slots held now; while a change is under way, those that it leads to."""
    can_rescale: bool = False
    """It trains with the adaptive core, and no change is under way."""
    held: str | None = None
    """Why it must not hold slots now, if so."""
    model: SpeedModel | None = None
    """None as long as neither the trial nor its study has measured anything."""
    promise: float = 0.5
    """Weight within its study, in (0, 1)."""
    goes_on: float = 1.0
    """Probability that it will be trained to its end, from what became of the study's other trials."""
    expected_part: float = 1.0
    """Part of what remains that it is expected to train: less than 1 where trials of its study are stopped."""
    rank_sentence: str = ""
    """Origin of the promise, for people."""
    progress: float = 0.0
    """Examples at the initial batch size."""
    remaining_progress: float | None = None
    """Progress left to the end of the declared epochs; None when it declared no length."""
    pause_seconds: float = 0.5
    """Seconds that a rescale costs this trial, measured where possible."""
    start_seconds: float = 2.0
    """Seconds from a replica's launch to its first training step, as seen in its study."""
    since_rescale_seconds: float = float("inf")
    steps_measured: int = 1_000_000
    """Steps that it has timed with as many replicas on as many nodes as it has now."""
    submitted_at: float = 0.0
    attained_slot_seconds: float = 0.0
    served_seconds: float = 0.0
    """Seconds that it has held slots, however many."""
    num_rescales: int = 0
    """Changes of allocation so far, the first start not counted."""
    preemptible: bool = True
    """Else it keeps what it holds to its end."""
    only_on: tuple[str, ...] = ()
    """Names or kinds of the nodes it may run on; empty: any."""
    study_weight: float = 1.0
    study_priority: int = 0
    quotas: tuple[SlotQuota, ...] = ()
    """Most slots that it may hold together with others at once: its study's, its namespace's."""
    goal: Goal = "completion_time"
    """Goal of its study's slots."""
    deadline_in: float | None = None
    """Seconds until its study's result is wanted; negative when that is over."""
    budget_left: float | None = None
    """Slot-seconds that its study may still use; negative when it has used more."""

    @property
    def held_slots(self) -> int:
        return sum(self.placement.values())

    def option(self, layout: str = "") -> LayoutOption:
        """Return the option of that layout; if it has none of that name, the present one or the first."""
        for name in (layout, self.layout):
            for each in self.options:
                if each.layout == name:
                    return each
        if self.options:
            return self.options[0]
        return LayoutOption(
            layout=self.layout,
            slots_per_replica=self.slots_per_replica,
            min_slots=self.min_slots,
            max_slots=self.max_slots,
            model=self.model,
        )

    def with_option(self, option: LayoutOption) -> TrialView:
        if not self.options:
            return self
        return replace(
            self,
            options=(option,),
            slots_per_replica=option.slots_per_replica,
            min_slots=option.min_slots,
            max_slots=option.max_slots,
            model=option.model,
        )

    def on_kind(self, kind: str) -> TrialView:
        """Return the view with its models for nodes of that kind."""
        options = tuple(
            each if each.model is None else replace(each, model=each.model.on(kind)) for each in self.options
        )
        return replace(self, options=options, model=None if self.model is None else self.model.on(kind))

    def is_whole(self, placement: Placement, largest_node: int, layout: str = "") -> bool:
        size = self.option(layout).slots_per_replica
        within = size == 1 or size > largest_node or all(count % size == 0 for count in placement.values())
        return within and sum(placement.values()) % size == 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """All that a policy may know at one moment."""

    now: float
    nodes: tuple[NodeView, ...]
    trials: tuple[TrialView, ...]
    """Trials in any order: a policy's answer does not depend on it."""
    coming: tuple[TrialView, ...] = ()
    """Trials that are about to be submitted, as far as that can be told: slots free for them only are no room to grow
    into. They are given nothing yet."""
    queued: tuple[QueuedSlots, ...] = ()
    """Slots that were asked for elsewhere and have not come yet."""

    def __post_init__(self) -> None:
        names = [node.name for node in self.nodes]
        twice = next((name for name, count in Counter(names).items() if count > 1), None)
        if twice is not None:
            raise ValueError(f"node {twice!r} appears twice; names of nodes must differ")

    @property
    def eligible(self) -> list[TrialView]:
        """Trials that may hold slots, in order of submission whatever the order in ``trials``.

        What they hold on nodes that are gone is left out.
        """
        nodes = {node.name for node in self.nodes}
        views = []
        for view in self.trials:
            if view.held is not None:
                continue
            if not nodes.issuperset(view.placement):
                left = {node: count for node, count in view.placement.items() if node in nodes}
                view = replace(view, placement=left)
            views.append(view)
        return sorted(views, key=lambda view: (view.submitted_at, view.trial_id))

    @property
    def largest_node(self) -> int:
        """Slots of the largest node; at least 1."""
        return max((1, *(node.largest_alike for node in self.nodes)))

    def largest_like(self, placement: Placement) -> int:
        """Slots of the largest node of the kinds that a placement is on; at least 1."""
        kinds = {node.kind for node in self.nodes if node.name in placement}
        return max((1, *(node.largest_alike for node in self.nodes if node.kind in kinds)))

    @property
    def total_slots(self) -> int:
        return sum(node.slots for node in self.nodes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Grant:
    """A policy's answer for one trial."""

    placement: Placement
    reason: Reason
    layout: str = ""
    """Layout for a trial that may have several; empty: as it is."""
    numbers: Mapping[str, float] = field(default_factory=dict)
    """Numbers that went into it, by names for people."""

    @property
    def slots(self) -> int:
        return sum(self.placement.values())


def check_grants(snapshot: Snapshot, grants: Mapping[str, Grant]) -> None:
    """Raise ValueError for slots that do not exist, negative ones, and counts outside a trial's bounds."""
    room = {node.name: node.slots for node in snapshot.nodes}
    for view in snapshot.trials:
        grant = grants.get(view.trial_id)
        if grant is None:
            continue
        for node, count in grant.placement.items():
            if count < 0 or count > room.get(node, 0):
                raise ValueError(
                    f"{view.trial_id} was granted {count} slots on {node}, where {room.get(node, 0)} are left"
                )
            room[node] -= count
        option = view.option(grant.layout)
        if not view.is_whole(grant.placement, snapshot.largest_like(grant.placement), grant.layout):
            raise ValueError(
                f"{view.trial_id} was granted {dict(grant.placement)}; each of its replicas takes "
                f"{option.slots_per_replica} slots of one node"
            )
        if grant.slots and not option.min_slots <= grant.slots <= option.max_slots:
            raise ValueError(
                f"{view.trial_id} was granted {grant.slots} slots; it takes none, or {option.min_slots} to "
                f"{option.max_slots}"
            )


class Policy(Protocol):
    @property
    def name(self) -> str: ...

    def allocate(self, snapshot: Snapshot) -> dict[str, Grant]:
        """Return a grant for every trial in the snapshot; never more than the nodes have, and pure."""
        ...
