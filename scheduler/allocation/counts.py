"""Counts of slots by trial, on a grid, so that the sum of the trials' values is largest within the slots.

All trials choose from one ascending grid of counts whose first entry is 0; a value of -inf forbids a count. Exact by
dynamic programming where that is quick; else by marginal gains on the concave envelope of each trial's values, whose
result is at most one trial's last step away from the optimum.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from scheduler.snapshot import TrialView

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]

EXACT_WORK = 400_000
"""Entries (trials x counts x slots) up to which the exact search is used: about 10 ms."""


def choose_counts(counts: Integers, values: Floats, total: int) -> Integers:
    """Index into ``counts`` for each row of ``values`` (trials x counts); exact for small problems."""
    if values.size * (total + 1) <= EXACT_WORK:
        return exact_counts(counts, values, total)
    return greedy_counts(counts, values, total)


def exact_counts(counts: Integers, values: Floats, total: int) -> Integers:
    """Dynamic programme over slots; O(trials x counts x slots)."""
    left = np.arange(total + 1)[None, :] - counts[:, None]
    possible = left >= 0
    left = np.where(possible, left, 0)
    best = np.zeros(total + 1)
    choices = np.empty((len(values), total + 1), dtype=np.int64)
    columns = np.arange(total + 1)
    for row, value in enumerate(values):
        candidates = np.where(possible, best[left] + value[:, None], -np.inf)
        choices[row] = np.argmax(candidates, axis=0)
        best = candidates[choices[row], columns]
    chosen = np.empty(len(values), dtype=np.int64)
    slots = int(np.argmax(best))
    for row in range(len(values) - 1, -1, -1):
        chosen[row] = choices[row, slots]
        slots -= int(counts[chosen[row]])
    return chosen


def greedy_counts(counts: Integers, values: Floats, total: int) -> Integers:
    """Return each trial's index in ``counts``, by steps along the concave envelopes, steepest first."""
    start = np.argmax(np.isfinite(values), axis=1)
    left = total - int(counts[start].sum())
    sizes = counts.tolist()
    rows = values.tolist()
    steps = [step for row, first in enumerate(start.tolist()) for step in envelope(sizes, rows[row], first, row)]
    steps.sort(key=lambda step: -step[0])
    chosen = start.astype(np.int64)
    stopped: set[int] = set()
    for slope, row, before, after in steps:
        if slope <= 0.0 or left <= 0:
            break
        size = sizes[after] - sizes[before]
        if row in stopped:
            continue
        if size > left:
            # The next steps of this trial lie beyond one that does not fit; part of it may.
            stopped.add(row)
            within = [
                index
                for index in range(before + 1, after)
                if sizes[index] - sizes[before] <= left and rows[row][index] > rows[row][before]
            ]
            if not within:
                continue
            after = max(within, key=lambda index: (rows[row][index], -index))
            size = sizes[after] - sizes[before]
        chosen[row] = after
        left -= size
    return np.asarray(chosen)


def envelope(counts: Sequence[int], values: Sequence[float], start: int, row: int) -> list[tuple[float, int, int, int]]:
    """(slope, row, from index, to index) along the upper concave envelope from ``start`` on, as far as it rises."""
    points = [start]
    slopes: list[float] = []
    for index in range(start + 1, len(values)):
        last = points[-1]
        if not values[index] > values[last]:
            continue
        slope = (values[index] - values[last]) / (counts[index] - counts[last])
        while slopes and slope >= slopes[-1]:
            points.pop()
            slopes.pop()
            last = points[-1]
            slope = (values[index] - values[last]) / (counts[index] - counts[last])
        points.append(index)
        slopes.append(slope)
    return [(slope, row, before, after) for slope, (before, after) in zip(slopes, pairwise(points), strict=True)]


MOST_NODES = 64
"""Largest allocation that is looked at, in whole nodes."""


def count_grid(views: Sequence[TrialView], total: int, node_slots: int) -> NDArray[np.int64]:
    """0, all counts within a node, whole nodes beyond, and what trials hold or need; ascending.

    Of trials whose replicas take several slots, also all whole numbers of replicas.
    """
    wanted = {0, *range(1, min(node_slots, total) + 1)}
    wanted.update(range(2 * node_slots, min(total, MOST_NODES * node_slots) + 1, node_slots))
    wanted.update(min(view.min_slots, total) for view in views)
    wanted.update(min(view.held_slots, total) for view in views)
    wanted.update(min(option.min_slots, total) for view in views for option in view.options)
    sizes = {view.slots_per_replica for view in views}
    sizes.update(option.slots_per_replica for view in views for option in view.options)
    for size in sizes - {1}:
        wanted.update(range(size, min(total, MOST_NODES * max(node_slots, size)) + 1, size))
    most = max((view.max_slots for view in views), default=1)
    return np.array(sorted(count for count in wanted if count <= max(most, 1)), dtype=np.int64)
