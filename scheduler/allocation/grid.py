"""The counts of slots that a search looks at."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from scheduler.snapshot import TrialView

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
