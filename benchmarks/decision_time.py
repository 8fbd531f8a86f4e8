"""Time of one decision of the default policy, from a snapshot with models made, at three sizes of cluster.

The peer is Pollux's objective by the same search; AdaptDL's genetic search took 11 to 13 CPU seconds for the smallest
case. Trials of one study share a profile, as they do live: the tables of goodput by count are made when measurements
change, not at a decision, and are timed in a row of their own.
"""

from __future__ import annotations

import random
import statistics
import time

from benchmarks.frame import Measurement
from dist_core.goodput import BatchBounds, ThroughputParams
from scheduler.knowledge.profile import StudyProfile, TrialModel
from scheduler.simulator.rivals import compared_policy
from scheduler.snapshot import NodeView, Snapshot, TrialView

CASES = ((160, 16, 4, 0.010), (1000, 500, 8, 0.100), (10_000, 4000, 8, 2.0))
"""Trials, nodes, slots a node, longest decision in seconds."""
ROUNDS = 5


def snapshot(trials: int, nodes: int, slots: int, *, seed: int = 0) -> Snapshot:
    """A cluster in the middle of its work: most trials hold something, one in ten has just come."""
    chance = random.Random(seed)
    profiles = [
        StudyProfile(
            params=ThroughputParams(
                0.02 * scale, 0.001 * scale, 0.05 * net, 0.002 * net, 0.02 * net, 0.001 * net, chance.uniform(1, 4)
            ),
            most_replicas=32,
        )
        for scale, net in ((chance.uniform(0.5, 5.0), chance.uniform(0.2, 3.0)) for _ in range(12))
    ]
    bounds = BatchBounds(init_batch=64, max_batch=4096, min_atomic=16, max_atomic=256)
    names = [f"n{index:05d}" for index in range(nodes)]
    free = dict.fromkeys(names, slots)
    views = []
    cursor = 0
    for number in range(trials):
        placement: dict[str, int] = {}
        wanted = chance.choice((1, 1, 2, 2, 3, slots, 2 * slots)) if chance.random() < 0.9 else 0
        while wanted and cursor < nodes:
            taken = min(wanted, free[names[cursor]])
            if taken:
                placement[names[cursor]] = taken
                free[names[cursor]] -= taken
                wanted -= taken
            if not free[names[cursor]]:
                cursor += 1
        model = TrialModel(
            profile=profiles[number % 12], bounds=bounds, noise=chance.uniform(1.0, 60.0), factor=chance.uniform(0.5, 2)
        )
        views.append(
            TrialView(
                trial_id=f"t{number:06d}",
                study=f"s{number % 12}",
                min_slots=1,
                max_slots=64,
                placement=placement,
                can_rescale=bool(placement),
                model=model,
                promise=chance.uniform(0.05, 0.95),
                remaining_progress=chance.lognormvariate(13.0, 1.5),
                submitted_at=float(number),
                pause_seconds=chance.uniform(0.1, 5.0),
            )
        )
    return Snapshot(now=1e6, nodes=tuple(NodeView(name=name, slots=slots) for name in names), trials=tuple(views))


def measure() -> list[Measurement]:
    rows = []
    ours, pollux = compared_policy("goodput"), compared_policy("pollux")
    for trials, nodes, slots, limit in CASES:
        seen = snapshot(trials, nodes, slots)
        began = time.perf_counter()
        ours.allocate(seen)
        first = time.perf_counter() - began
        times: dict[str, list[float]] = {"ours": [], "pollux": []}
        for _ in range(ROUNDS):
            for name, policy in (("ours", ours), ("pollux", pollux)):
                began = time.perf_counter()
                policy.allocate(seen)
                times[name].append(time.perf_counter() - began)
        rows.append(
            Measurement(
                what=f"one decision, {trials} trials on {nodes} nodes with {slots} slots",
                ours=1e3 * statistics.median(times["ours"]),
                peer=1e3 * limit,
                unit="ms",
                peer_name="the longest it may take",
                target=1.0,
                details={
                    "with_tables_to_make_ms": 1e3 * first,
                    "pollux_objective_ms": 1e3 * statistics.median(times["pollux"]),
                },
            )
        )
    return rows
