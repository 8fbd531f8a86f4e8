"""Number of nodes for a cluster: as many as save more waiting than they cost.

Let V be what an hour sooner is worth to the owner of a trial, P the price of a node for an hour, J the trials that wait
or run, and S(N) their summed speed on N nodes. While they run, V J + P N is spent an hour, and work is done at S(N). A
piece of work then costs

    (V J + P N) / S(N)

and the best N is where this is least: there the last node's marginal goodput per money equals the average one's. For a
single trial it is the exact optimum of V x completion time + money, at every moment, however its efficiency changes.
S is the sum of first steps along the trials' concave envelopes of speed-up by slots. Pollux keeps the mean speed-up
of a slot within a band instead (OSDI'21, section 4.2.3), whatever nodes cost.

A change has to promise a saving, and to be wanted for a while.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from scheduler.allocation.counts import envelope
from scheduler.snapshot import Snapshot, TrialView

Floats = NDArray[np.float64]


LEAST_SAVING = 0.02
"""Part of the cost of work that a change of the number of nodes has to save."""
EXPLORATION = 2.0
"""A trial counts for so many times the replicas that anything was measured with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AutoscaleSettings:
    slots: int
    """Slots of a node; all nodes are alike."""
    price_per_hour: float
    least_nodes: int = 0
    most_nodes: int = 16
    worth_of_an_hour: float = 10.0
    """Worth of an hour sooner for each trial, in the currency of the price."""
    shrink_after_seconds: float = 300.0


def desired_nodes(snapshot: Snapshot, settings: AutoscaleSettings, present: int | None = None) -> int:
    """Return the number of nodes under which work is cheapest; ``present`` where nothing else saves enough."""
    eligible = snapshot.eligible
    waiting = sum(view.study_weight for view in eligible) * settings.worth_of_an_hour
    speeds = np.concatenate([[0.0], np.cumsum(_marginal_speeds(eligible, settings))])

    def cost_of_work(nodes: int) -> float:
        speed = float(speeds[min(settings.slots * nodes, len(speeds) - 1)])
        return (waiting + settings.price_per_hour * nodes) / speed if speed > 0 else float("inf")

    counts = range(settings.least_nodes, max(settings.least_nodes, settings.most_nodes) + 1)
    best = min(counts, key=cost_of_work)
    if present is not None and present in counts and cost_of_work(best) > (1.0 - LEAST_SAVING) * cost_of_work(present):
        return present
    return best


def _marginal_speeds(views: list[TrialView], settings: AutoscaleSettings) -> Floats:
    """Return what each further slot adds, in units of a first slot, largest first."""
    total = settings.most_nodes * settings.slots
    slopes: list[float] = []
    for view in views:
        least = min(view.min_slots, total)
        # Minimums are served whatever they bring.
        slopes += [1.0] * least
        if view.model is None:
            continue
        reach = min(view.max_slots, int(EXPLORATION * max(1, view.model.most_profiled)), total)
        counts = np.arange(least, max(reach, least) + 1)
        if len(counts) < 2:
            continue
        first = view.model.curve(settings.slots, np.array([1]))[0]
        speeds = (view.model.curve(settings.slots, counts) / first).tolist()
        for slope, _, before, after in envelope(counts.tolist(), speeds, 0, 0):
            slopes += [min(slope, 1.0)] * int(counts[after] - counts[before])
    return np.sort(np.array(slopes))[::-1]


class Autoscaler:
    """Follows ``desired_nodes``, with patience where fewer nodes are wanted: remembers since when."""

    def __init__(self, settings: AutoscaleSettings) -> None:
        self.settings = settings
        self._fewer_since: float | None = None

    def decide(self, snapshot: Snapshot, present: int, now: float) -> int:
        """Return how many nodes to have from now on; ``present`` is how many there are."""
        desired = desired_nodes(snapshot, self.settings, present)
        if desired >= present:
            self._fewer_since = None
            return desired
        if self._fewer_since is None:
            self._fewer_since = now
        return desired if now - self._fewer_since >= self.settings.shrink_after_seconds else present
