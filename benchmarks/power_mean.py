"""Pollux's own objective on random snapshots: our search against greedy, exact, integer programme and genetic search.

The objective is the harmonic mean of the trials' speed-ups, each over its fair share, with placements as they are: an
allocation that spans more nodes than it must is worth what the model says of it. 16 to 500 trials on clusters with one
slot of room for each; allocations that are running, and none at all (a cold start).
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np

from benchmarks.decision_time import snapshot
from benchmarks.frame import Measurement
from scheduler.allocation.counts import count_grid, exact_counts, greedy_counts
from scheduler.allocation.options import choose_options
from scheduler.allocation.placement import held_by, packed
from scheduler.knowledge.profile import TrialModel
from scheduler.simulator.rivals.pollux import SMALLEST_SHARE, PolluxPolicy, PolluxSearchPolicy, harmonic_values
from scheduler.snapshot import Placement, Snapshot

CASES = ((16, 8), (60, 16), (160, 40), (500, 125))
"""Trials, and nodes with 4 slots."""
SEEDS = 5
MOST_SEARCHED = 160
"""Trials up to which the genetic search is run; it takes minutes beyond."""

Placements = Mapping[str, Placement]


def worth(seen: Snapshot, placed: Placements) -> float:
    """Harmonic mean of shares, restarts charged."""
    eligible = seen.eligible
    fair = max(1, math.ceil(seen.total_slots / len(eligible)))
    per_slot = len(seen.nodes) / seen.total_slots
    inverses = []
    for view in eligible:
        held = {node: count for node, count in placed.get(view.trial_id, {}).items() if count}
        assert isinstance(view.model, TrialModel)
        share = 0.0
        if held:
            count = sum(held.values())
            fair_speed = view.model.curve(seen.largest_node, np.array([fair]))[0]
            share = float(view.model.goodput(len(held), count)[0]) / fair_speed * per_slot
            if view.held_slots and held != dict(view.placement):
                age = seen.now - view.submitted_at
                share *= max(age - view.num_rescales * view.pause_seconds, 0.0) / (age + view.pause_seconds)
        inverses.append(1.0 / (share + SMALLEST_SHARE))
    return len(inverses) / sum(inverses)


def contenders(seen: Snapshot) -> dict[str, Callable[[], Placements]]:
    eligible = seen.eligible
    counts = count_grid(eligible, seen.total_slots, seen.largest_node)
    fair = max(1, math.ceil(seen.total_slots / len(eligible)))
    values = np.array([harmonic_values(view, counts, fair, seen.largest_node, seen) for view in eligible])

    def place(chosen: np.ndarray) -> Placements:
        wanted = {view.trial_id: int(count) for view, count in zip(eligible, chosen, strict=True)}
        return packed(wanted, seen.nodes, held_by(eligible))

    def programme() -> Placements:
        positive = np.where(np.isfinite(values), values - values[:, [0]], -np.inf)[:, 1:]
        none = np.zeros(len(counts) - 1, dtype=np.int64)
        chosen = choose_options(positive, counts[1:], none, np.array([seen.total_slots]))
        return place(np.where(chosen >= 0, counts[1:][chosen], 0))

    def granted(policy: PolluxPolicy | PolluxSearchPolicy) -> Placements:
        return {name: grant.placement for name, grant in policy.allocate(seen).items()}

    found: dict[str, Callable[[], Placements]] = {
        "ours": lambda: granted(PolluxPolicy()),
        "greedy": lambda: place(counts[greedy_counts(counts, values, seen.total_slots)]),
        "exact": lambda: place(counts[exact_counts(counts, values, seen.total_slots)]),
        "integer programme": programme,
    }
    if len(eligible) <= MOST_SEARCHED:
        found["genetic search"] = lambda: granted(PolluxSearchPolicy())
    return found


def measure() -> list[Measurement]:
    rows = []
    for trials, nodes in CASES:
        for cold in (False, True):
            ratios: dict[str, list[float]] = {}
            seconds: dict[str, list[float]] = {}
            for seed in range(SEEDS):
                seen = snapshot(trials, nodes, 4, seed=seed)
                if cold:
                    views = (replace(view, placement={}, can_rescale=False) for view in seen.trials)
                    seen = replace(seen, trials=tuple(views))
                found = {}
                for name, search in contenders(seen).items():
                    began = time.perf_counter()
                    placed = search()
                    seconds.setdefault(name, []).append(time.perf_counter() - began)
                    found[name] = worth(seen, placed)
                better = max(found["exact"], found["greedy"])
                for name, value in found.items():
                    ratios.setdefault(name, []).append(value / better)
            details = {
                "of_the_better_one": {name: statistics.fmean(values) for name, values in ratios.items()},
                "least": {name: min(values) for name, values in ratios.items()},
                "median_ms": {name: 1e3 * statistics.median(values) for name, values in seconds.items()},
            }
            start = "from a cold start" if cold else "running"
            for peer, target in (("the better of exact and greedy", 1.0), ("integer programme", 0.99)):
                other = statistics.fmean(ratios[peer]) if peer in ratios else 1.0
                rows.append(
                    Measurement(
                        what=f"harmonic mean of shares, {trials} trials, {start}",
                        ours=statistics.fmean(ratios["ours"]),
                        peer=other,
                        unit="",
                        peer_name=peer,
                        lower_is_better=False,
                        target=target,
                        details=details,
                    )
                )
            if "genetic search" in ratios:
                rows.append(
                    Measurement(
                        what=f"genetic search, {trials} trials, {start}",
                        ours=statistics.fmean(ratios["genetic search"]),
                        peer=1.0,
                        unit="",
                        peer_name="the better of exact and greedy",
                        lower_is_better=False,
                        details=details,
                    )
                )
    return rows
