"""Use of slots by a recorded scheduler: how often it changed its mind, and how long slots stood idle.

A slot is idle while nobody trains on it although a trial could: live trials could use as many slots together as their
models gain by, up to the most that each may have. So slots count that wait for a decision, for a process to start or
for an epoch's end, and so do those that the policy leaves free on purpose.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from dist_core.goodput import GoodputModel
from scheduler.simulator.application import ModelledApplication
from scheduler.simulator.training import Change
from trials.record import ReplicaRecord, TrialRecord
from trials.states import TrialState
from trials.store.base import HistoryEntry

Floats = NDArray[np.float64]
LOSS_CODES = frozenset({"replica_lost", "replica_preempted"})
"""Changes of size that nobody decided."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RanTrial:
    """A trial, with all that is kept of it."""

    name: str
    record: TrialRecord
    application: ModelledApplication
    history: Sequence[HistoryEntry]
    replicas: Sequence[ReplicaRecord]
    pause_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class AsItRan:
    nodes: int
    slots_per_node: int
    """Most slots of a node that were ever used."""
    slots: int
    """Slots that were ever used."""
    makespan_seconds: float
    rescales: int
    undone: int
    """Rescales that were taken back before they had paid for their pause."""
    idle_share: float
    """Idle share of the slot time that trials could have used."""
    completion_seconds: Mapping[str, float]
    """Completion time of each trial that has ended."""
    trained: Sequence[tuple[float, Mapping[str, int]]]
    """Slots that each trial trained on, from so many seconds after the first submission on; ascending."""

    @property
    def sentence(self) -> str:
        undone = self.undone / self.rescales if self.rescales else 0.0
        return (
            f"as it ran: {self.makespan_seconds:.0f} s on {self.slots} slots, {self.rescales} rescales, {undone:.1%} "
            f"of them undone, {self.idle_share:.1%} of the slot time idle although a trial could have used it"
        )


def as_it_ran(trials: Sequence[RanTrial], now: float) -> AsItRan:
    """Return what trials did; ``now``: until when those are looked at that have not ended."""
    slots = len({(replica.node, replica.slot) for trial in trials for replica in trial.replicas})
    by_node = Counter(node for node, _ in {(row.node, row.slot) for trial in trials for row in trial.replicas})
    node_slots = max(by_node.values(), default=1)
    changes: Counter[str] = Counter()
    usable: dict[float, int] = {}
    training: dict[float, int] = {}
    by_trial: dict[str, dict[float, int]] = {}
    for trial in trials:
        curve = _goodput(trial, node_slots)
        changes.update(_changes(trial, curve))
        began, ended = trial.record.submitted_at, trial.record.finished_at or now
        _add(usable, began, ended, (int(np.argmax(curve[1:])) + 1) * trial.record.slots_per_replica)
        for replica in trial.replicas:
            since = _trains_from(replica, trial.history)
            if since is not None:
                _add(training, since, min(replica.gone_at or ended, ended), 1)
                _add(by_trial.setdefault(trial.name, {}), since, min(replica.gone_at or ended, ended), 1)
    first = min((trial.record.submitted_at for trial in trials), default=now)
    last = max((trial.record.finished_at or now for trial in trials), default=now)
    could, did = _integrals(usable, training, slots)
    return AsItRan(
        nodes=max(1, len(by_node)),
        slots_per_node=node_slots,
        slots=slots,
        makespan_seconds=last - first,
        rescales=changes["rescales"],
        undone=changes["undone"],
        idle_share=1.0 - did / could if could else 0.0,
        completion_seconds={
            trial.name: trial.record.finished_at - trial.record.submitted_at
            for trial in trials
            if trial.record.finished_at is not None
        },
        trained=_levels(by_trial, first),
    )


def entered(trial: RanTrial) -> list[tuple[float, float]]:
    """Return when each replica was ready and when it was first seen to train, without those that never were."""
    found = [(replica.ready_at, _trains_from(replica, trial.history)) for replica in trial.replicas]
    return [(ready, since) for ready, since in found if ready is not None and since is not None]


def _goodput(trial: RanTrial, node_slots: int) -> Floats:
    """Return goodput by number of slots from 0 to the most it may have, halfway through its length."""
    application = trial.application
    model = GoodputModel(
        throughput=application.params,
        statistics=application.statistics(application.bounds.init_batch, application.epochs // 2),
        bounds=application.bounds,
    )
    counts = np.arange(1, trial.record.spec.max_replicas + 1)
    return np.concatenate([[0.0], model.goodput(-(-counts // node_slots), counts)])


def _changes(trial: RanTrial, goodput: Floats) -> Mapping[str, int]:
    """Rescales of the trial that were decided, and how many of them undid the one before."""
    latest: Change | None = None
    counts: Counter[str] = Counter()
    for entry in trial.history:
        before, arrow, rest = entry.what.partition(" -> ")
        if not arrow or entry.reason.code in LOSS_CODES:
            continue
        size, wanted = int(before), int(rest.split()[0])
        counts["rescales"] += 1
        so_far = float(goodput[min(size, len(goodput) - 1)])
        counts["undone"] += latest is not None and latest.is_undone_by(wanted, so_far, entry.at)
        latest = Change(entry.at, size, wanted, so_far, trial.pause_seconds)
    return counts


def _trains_from(replica: ReplicaRecord, history: Sequence[HistoryEntry]) -> float | None:
    """Return when the trial was first seen to train after this replica was ready; None if it never was."""
    ready = replica.launched_at if replica.ready_at is None else replica.ready_at
    for entry in history:
        if entry.what == TrialState.RUNNING.value and entry.at >= ready:
            return entry.at if replica.gone_at is None or entry.at < replica.gone_at else None
    return None


def _add(steps: dict[float, int], since: float, until: float, amount: int) -> None:
    if until > since:
        steps[since] = steps.get(since, 0) + amount
        steps[until] = steps.get(until, 0) - amount


def _levels(by_trial: Mapping[str, Mapping[float, int]], first: float) -> list[tuple[float, Mapping[str, int]]]:
    now: Counter[str] = Counter()
    levels: list[tuple[float, Mapping[str, int]]] = []
    for moment in sorted({moment for steps in by_trial.values() for moment in steps}):
        for name, steps in by_trial.items():
            now[name] += steps.get(moment, 0)
        levels.append((moment - first, {name: slots for name, slots in now.items() if slots}))
    return levels


def _integrals(usable: Mapping[float, int], training: Mapping[float, int], slots: int) -> tuple[float, float]:
    """Slot-seconds that trials could have used, and those of them that they did use."""
    could = did = 0.0
    wanted = busy = 0
    moments = sorted({*usable, *training})
    for moment, following in pairwise(moments):
        wanted += usable.get(moment, 0)
        busy += training.get(moment, 0)
        most = min(wanted, slots)
        could += most * (following - moment)
        did += min(busy, most) * (following - moment)
    return could, did
