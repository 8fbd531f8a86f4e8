"""Number of nodes for a cluster: as many as save more waiting than they cost.

Let V be what an hour sooner is worth to the owner of a trial, P the price of a node for an hour, J the trials that wait
or run, and S(N) their summed speed on N nodes. While they run, V J + P N is spent an hour, and work is done at S(N). A
piece of work then costs

    (V J + P N) / S(N)

and the best N is where this is least: there the last node's marginal goodput per money equals the average one's. For a
single trial it is the exact optimum of V x completion time + money, at every moment, however its efficiency changes.
S is the sum of first steps along the trials' concave envelopes of speed-up by slots. Pollux keeps the mean speed-up
of a slot within a band instead (OSDI'21, section 4.2.3), whatever nodes cost.

Offers (kinds of nodes, spot or ours) are taken in order of price for what their slots do; spot nodes do less by the
time that their reclaims cost. A change has to promise a saving, and to be wanted for a while.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from scheduler.allocation.counts import envelope
from scheduler.snapshot import Snapshot, TrialView

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeOffer:
    kind: str
    slots: int
    price_per_hour: float
    least_nodes: int = 0
    most_nodes: int = 16
    reclaims_per_hour: float = 0.0
    """Times an hour that a node is taken away; 0 for one that is ours until given back."""


LEAST_SAVING = 0.02
"""Part of the cost of work that a change of the number of nodes has to save."""
EXPLORATION = 2.0
"""A trial counts for so many times the replicas that anything was measured with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AutoscaleSettings:
    offers: tuple[NodeOffer, ...]
    worth_of_an_hour: float = 10.0
    """Worth of an hour sooner for each trial, in the currency of the offers."""
    shrink_after_seconds: float = 300.0


def desired_nodes(
    snapshot: Snapshot, settings: AutoscaleSettings, present: Mapping[str, int] | None = None
) -> dict[str, int]:
    """Nodes of each kind under which work is cheapest; ``present`` ones where nothing else saves enough."""
    eligible = snapshot.eligible
    waiting = sum(view.study_weight for view in eligible) * settings.worth_of_an_hour
    useful = {offer.kind: _speed_of_slot(offer, eligible) for offer in settings.offers}
    offers = sorted(settings.offers, key=lambda offer: offer.price_per_hour / (offer.slots * useful[offer.kind]))
    speeds = np.concatenate([[0.0], np.cumsum(_marginal_speeds(eligible, settings))])

    def cost_of_work(nodes: Mapping[str, int]) -> float:
        slots = sum(offer.slots * nodes.get(offer.kind, 0) for offer in offers)
        money = sum(offer.price_per_hour * nodes.get(offer.kind, 0) for offer in offers)
        mean_use = sum(offer.slots * nodes.get(offer.kind, 0) * useful[offer.kind] for offer in offers) / max(slots, 1)
        speed = float(speeds[min(slots, len(speeds) - 1)]) * mean_use
        return (waiting + money) / speed if speed > 0 else float("inf")

    nodes = {offer.kind: offer.least_nodes for offer in offers}
    best, cheapest = dict(nodes), cost_of_work(nodes)
    for offer in offers:
        for _ in range(offer.most_nodes - offer.least_nodes):
            nodes[offer.kind] += 1
            cost = cost_of_work(nodes)
            if cost < cheapest:
                best, cheapest = dict(nodes), cost
        nodes = dict(best)
    if present is not None and cheapest > (1.0 - LEAST_SAVING) * cost_of_work(present):
        within = all(offer.least_nodes <= present.get(offer.kind, 0) <= offer.most_nodes for offer in offers)
        if within:
            return {offer.kind: present.get(offer.kind, 0) for offer in offers}
    return best


def _speed_of_slot(offer: NodeOffer, views: list[TrialView]) -> float:
    """Relative to those that models were measured on, less what reclaims cost."""
    known = [view.model for view in views if view.model is not None]
    one = np.array([1])
    ratios = [
        float((model.on(offer.kind).curve(offer.slots, one) / model.curve(offer.slots, one))[0]) for model in known
    ]
    lost = max((view.pause_seconds + view.start_seconds for view in views), default=0.0)
    return max(0.05, (statistics.median(ratios) if ratios else 1.0) * (1.0 - offer.reclaims_per_hour * lost / 3600.0))


def _marginal_speeds(views: list[TrialView], settings: AutoscaleSettings) -> Floats:
    """Return what each further slot adds, in units of a first slot, largest first."""
    total = sum(offer.most_nodes * offer.slots for offer in settings.offers)
    node_slots = max((offer.slots for offer in settings.offers), default=1)
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
        speeds = (view.model.curve(node_slots, counts) / view.model.curve(node_slots, np.array([1]))[0]).tolist()
        for slope, _, before, after in envelope(counts.tolist(), speeds, 0, 0):
            slopes += [min(slope, 1.0)] * int(counts[after] - counts[before])
    return np.sort(np.array(slopes))[::-1]


class Autoscaler:
    """Follows ``desired_nodes``, with patience where fewer nodes are wanted: remembers since when."""

    def __init__(self, settings: AutoscaleSettings) -> None:
        self.settings = settings
        self._fewer_since: dict[str, float] = {}

    def cost_per_hour(self, nodes: Mapping[str, int]) -> float:
        return sum(offer.price_per_hour * nodes.get(offer.kind, 0) for offer in self.settings.offers)

    def decide(self, snapshot: Snapshot, present: Mapping[str, int], now: float) -> dict[str, int]:
        """Return how many nodes of each kind to have from now on; ``present`` is how many there are."""
        desired = desired_nodes(snapshot, self.settings, present)
        wanted: dict[str, int] = {}
        for kind, count in desired.items():
            has = present.get(kind, 0)
            if count >= has:
                self._fewer_since.pop(kind, None)
                wanted[kind] = count
                continue
            since = self._fewer_since.setdefault(kind, now)
            wanted[kind] = count if now - since >= self.settings.shrink_after_seconds else has
        return wanted
