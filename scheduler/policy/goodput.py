"""The default policy: slots go where they buy most goodput, weighed by promise, and move only when that pays.

Every trial first gets its minimum, running ones before waiting ones, waiting ones in order of submission; while a
trial waits, others shrink towards their minimum to let it in. Slots left over are given one at a time to the trial
with the largest marginal value

    weight x (goodput(k + 1) - goodput(k)) / goodput(1)        weight = promise^2 x study weight

where goodput(k) is the trial's own fitted model (Pollux, OSDI'21, eq. 6 and 14). Then single slots move from the
trial that loses least by it to the one that gains most. Growing, and moving, happen only when the gain over the
trial's expected remaining life pays for the pauses of the rescale and for the slot that does nothing while a new
replica starts, as measured for that trial and its study.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from scheduler.snapshot import Grant, Placement, Snapshot, TrialView
from trials.record import Reason

HORIZON_SECONDS = 60.0
"""Over how long a gain is counted for a trial that declared no length."""
LONGEST_HORIZON_SECONDS = 600.0
"""Reports and models change; a gain further ahead is not believed."""
SMALLEST_GAIN = 0.05
"""Marginal goodput, relative to one replica's, below which a further replica is not worth its slot."""
MOVE_MARGIN = 1.5
"""A slot moves between running trials only if the receiver's gain exceeds the giver's loss by this factor."""
SETTLE_SECONDS = 2.0
SETTLE_FACTOR = 8.0
"""A trial is left alone after a rescale until its new step times are measured, and for a multiple of what it cost."""
PROMISE_POWER = 2.0
"""Sharpens promise: a slot should not leave the best trial for the worst one's steeper speed-up."""
ROOM_SECONDS = 1.0
"""Slots that have been free for less are about to be taken by the study's next trial."""


@dataclass(slots=True)
class _Draft:
    """One trial's count while the search moves slots around, and the value of each count."""

    view: TrialView
    count: int
    values: np.ndarray
    """Weighted goodput relative to one replica's, by count; index 0 is 0."""
    note: str = ""

    def gain(self) -> float:
        """Value of one more replica; -inf when it may not have one, or has not even its minimum."""
        if self.count < self.view.min_replicas or self.count + 1 >= len(self.values):
            return float("-inf")
        return float(self.values[self.count + 1] - self.values[self.count])

    def loss(self) -> float:
        """Value given up with one replica less; inf when it may not go lower."""
        if self.count <= self.view.min_replicas:
            return float("inf")
        return float(self.values[self.count] - self.values[self.count - 1])

    @property
    def horizon(self) -> float:
        """Seconds over which a further replica would earn something: the rest of the trial, less its start."""
        remaining = self.view.remaining_seconds
        rest = HORIZON_SECONDS if remaining is None else min(remaining, LONGEST_HORIZON_SECONDS)
        return max(0.0, rest - self.view.start_seconds)

    def pause_cost(self) -> float:
        """Value lost while the trial switches once."""
        return self.view.pause_seconds * float(self.values[min(self.count, len(self.values) - 1)])


class GoodputPolicy:
    name = "goodput"

    def allocate(self, snapshot: Snapshot) -> dict[str, Grant]:
        drafts = {view.trial_id: _Draft(view, 0, _values(view)) for view in snapshot.trials}
        waiting = self._grant_minimums(snapshot, drafts)
        if not waiting:
            self._keep_current(snapshot, drafts)
            self._grow(snapshot, drafts)
            self._move(drafts)
        return self._grants(snapshot, drafts, waiting)

    def _grant_minimums(self, snapshot: Snapshot, drafts: dict[str, _Draft]) -> list[TrialView]:
        """Everybody's minimum while there is room; returns those that have to wait."""
        free = snapshot.total_slots
        waiting: list[TrialView] = []
        # A trial that runs is never stopped for one that waits: killing progress to start afresh gains nothing.
        order = sorted(snapshot.trials, key=lambda view: view.held_slots == 0)
        for view in order:
            if view.held is not None:
                continue
            if view.min_replicas <= free:
                drafts[view.trial_id].count = view.min_replicas
                free -= view.min_replicas
            else:
                # Also a trial that lost replicas and cannot have its minimum any more: it pauses until it can.
                waiting.append(view)
        if waiting:
            # What the minimums left over is too small for whoever waits first; running trials keep what they have.
            for view in order:
                draft = drafts[view.trial_id]
                if 0 < draft.count < view.held_slots:
                    kept = min(view.held_slots - draft.count, free)
                    draft.count += kept
                    free -= kept
        return waiting

    def _keep_current(self, snapshot: Snapshot, drafts: dict[str, _Draft]) -> None:
        """Start from what is held now, as far as the minimums of the others leave room for it."""
        free = snapshot.total_slots - sum(draft.count for draft in drafts.values())
        extra = [
            draft for draft in drafts.values() if draft.view.held is None and draft.view.held_slots > draft.count > 0
        ]
        while free > 0 and extra:
            # Highest value first, so that those who shrink for a newcomer are those who lose least.
            best = max(extra, key=lambda draft: (draft.gain(), draft.view.trial_id))
            best.count += 1
            free -= 1
            extra = [draft for draft in extra if draft.view.held_slots > draft.count]

    def _grow(self, snapshot: Snapshot, drafts: dict[str, _Draft]) -> None:
        free = snapshot.total_slots - sum(draft.count for draft in drafts.values())
        if snapshot.free_for_seconds < ROOM_SECONDS:
            return
        grown: set[str] = set()
        while free > 0:
            candidates = [
                draft
                for trial_id, draft in drafts.items()
                if _may_change(draft.view) and self._pays(draft, already=trial_id in grown)
            ]
            if not candidates:
                return
            best = max(candidates, key=lambda draft: (draft.gain(), draft.view.trial_id))
            best.count += 1
            grown.add(best.view.trial_id)
            free -= 1

    @staticmethod
    def _pays(draft: _Draft, *, already: bool) -> bool:
        """Whether one more replica earns more than the pause costs; a second one adds no pause."""
        gain = draft.gain()
        if gain < SMALLEST_GAIN * _weight(draft.view):
            return False
        return already or gain * draft.horizon > draft.pause_cost()

    def _move(self, drafts: dict[str, _Draft]) -> None:
        """Move single slots from running trials to others while it pays, at most one per trial and decision."""
        moved: set[str] = set()
        while True:
            movable = [
                draft for draft in drafts.values() if _may_change(draft.view) and draft.view.trial_id not in moved
            ]
            givers = [draft for draft in movable if draft.count > draft.view.min_replicas]
            if not givers:
                return
            giver = min(givers, key=lambda draft: (draft.loss(), draft.view.trial_id))
            takers = [draft for draft in movable if draft is not giver]
            if not takers:
                return
            taker = max(takers, key=lambda draft: (draft.gain(), draft.view.trial_id))
            horizon = min(giver.horizon, taker.horizon)
            # Until the taker's new replica trains, the moved slot earns nothing.
            cost = giver.pause_cost() + taker.pause_cost() + giver.loss() * taker.view.start_seconds
            if taker.gain() <= MOVE_MARGIN * giver.loss() or (taker.gain() - giver.loss()) * horizon <= cost:
                return
            giver.count -= 1
            taker.count += 1
            giver.note = f"one slot went to {taker.view.trial_id}, which gains more from it"
            taker.note = f"one slot came from {giver.view.trial_id}, which loses less by it"
            moved |= {giver.view.trial_id, taker.view.trial_id}

    def _grants(self, snapshot: Snapshot, drafts: dict[str, _Draft], waiting: list[TrialView]) -> dict[str, Grant]:
        placements = place({trial_id: draft.count for trial_id, draft in drafts.items()}, snapshot)
        free = snapshot.total_slots - sum(draft.count for draft in drafts.values())
        return {
            trial_id: Grant(placement=placements[trial_id], reason=_reason(draft, snapshot, waiting, free))
            for trial_id, draft in drafts.items()
        }


def _weight(view: TrialView) -> float:
    return float(view.promise**PROMISE_POWER * view.study_weight)


def _values(view: TrialView) -> np.ndarray:
    """Weighted relative goodput of 0..k replicas, k being the most this trial may be given now."""
    weight = _weight(view)
    if view.model is None or not view.can_rescale:
        # Unknown yet, or in the middle of a switch: worth what it holds, and no more.
        most = max(view.min_replicas, view.held_slots)
        return weight * np.minimum(np.arange(most + 1), max(1, view.held_slots))
    # Twice what was seen, at most (Pollux, section 4.1): a model says little about what lies far beyond its data.
    most = min(
        view.max_replicas, max(2 * view.most_profiled, view.min_replicas), view.model.bounds.max_useful_replicas()
    )
    most = max(most, view.min_replicas, view.held_slots)
    counts = np.arange(1, most + 1)
    goodput = view.model.goodput(np.ones_like(counts), counts)
    return weight * np.concatenate([[0.0], goodput / goodput[0]])


def _may_change(view: TrialView) -> bool:
    settled = max(SETTLE_SECONDS, SETTLE_FACTOR * (view.pause_seconds + view.start_seconds))
    return view.held is None and view.can_rescale and view.since_rescale_seconds >= settled


def _reason(draft: _Draft, snapshot: Snapshot, waiting: list[TrialView], free: int) -> Reason:
    view = draft.view
    if view.held is not None:
        return Reason(code="held", sentence=view.held)
    if any(view is other for other in waiting):
        largest = max((node.slots for node in snapshot.nodes), default=0)
        if view.min_replicas > snapshot.total_slots:
            return Reason(
                code="too_large",
                sentence=f"needs {view.min_replicas} slots; the cluster has {snapshot.total_slots}, "
                f"{largest} on its largest node",
            )
        return Reason(
            code="no_free_slot",
            sentence=f"needs {_slots(view.min_replicas)}; {free} of {snapshot.total_slots} can be freed now",
        )
    before, after = view.held_slots, draft.count
    if before == 0:
        return Reason(code="started", sentence=f"starts on {_slots(after)}")
    if after == before:
        return Reason(code="unchanged", sentence=f"keeps {_slots(after)}")
    low, high = min(before, after), max(before, after)
    change = f"goodput x{draft.values[after] / max(draft.values[before], 1e-12):.2f} by its model"
    story = f"{change}; promise {view.promise:.2f} ({view.rank_sentence})"
    if draft.note:
        story = f"{draft.note}; {story}"
    if after > before:
        prefix = "" if draft.note else f"{_slots(high - low)} free; "
        return Reason(code="goodput_gain", sentence=f"{prefix}{story}")
    prefix = "" if draft.note else "makes room for a waiting trial; "
    return Reason(code="gives_way", sentence=f"{prefix}{story}")


def _slots(count: int) -> str:
    return f"{count} slot" if count == 1 else f"{count} slots"


def place(counts: dict[str, int], snapshot: Snapshot) -> dict[str, Placement]:
    """Counts -> nodes: keep what is held, then fill the node with the most room, so that trials span few nodes."""
    room = {node.name: node.slots for node in snapshot.nodes}
    placements: dict[str, dict[str, int]] = {}
    views = {view.trial_id: view for view in snapshot.trials}
    for trial_id, count in counts.items():
        kept: dict[str, int] = {}
        for node, held in sorted(views[trial_id].placement.items(), key=lambda item: -item[1]):
            stay = min(held, count - sum(kept.values()), room.get(node, 0))
            if stay > 0:
                kept[node] = stay
                room[node] -= stay
        placements[trial_id] = kept
    for trial_id, count in sorted(counts.items(), key=lambda item: -item[1]):
        placement = placements[trial_id]
        while sum(placement.values()) < count:
            node = max(room, key=lambda name: (placement.get(name, 0) > 0 and room[name] > 0, room[name], name))
            placement[node] = placement.get(node, 0) + 1
            room[node] -= 1
    return {trial_id: dict(placement) for trial_id, placement in placements.items()}
