"""The simulated cluster: what nodes there are, what they cost, and how they come and go with demand."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from scheduler.allocation.autoscale import Autoscaler, AutoscaleSettings
from scheduler.simulator.replicas import Timing
from scheduler.simulator.training import Request
from scheduler.snapshot import Snapshot
from trials.launch.base import NodeSlots


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeKind:
    """Kind of node in a simulated cluster. ``speed``: factor on the measured speed of its slots."""

    name: str
    nodes: int
    slots_per_node: int
    speed: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationSettings:
    nodes: int = 16
    slots_per_node: int = 4
    kinds: tuple[NodeKind, ...] = ()
    """Instead of ``nodes`` that are all alike."""
    interference: float = 0.0
    """Distributed jobs that share a node are slower by this part."""
    autoscale: AutoscaleSettings | None = None
    """Nodes come and go with demand instead of being ``nodes`` throughout."""
    decide_every_seconds: float = 60.0
    """Least time between two decisions with ``timing``; the loop otherwise decides whenever it is woken."""
    timing: Timing | None = None
    """Time goes from event to event, as for a live scheduler; None: from decision to decision, and whatever is decided
    is done at once, but for the pause."""
    rescale_seconds: float = 30.0
    """Pause of a job whose placement changes, the first start included."""
    request: Request = "elastic"
    declares_length: bool = True
    """Jobs say how many epochs they will train."""
    oracle: bool = False
    """The policy is told true speeds and remaining work."""
    pools: bool = True
    """Jobs that run the same code are one study, whose measurements are pooled."""
    longest_seconds: float = 30 * 86400.0


class SimulatedCluster:
    def __init__(self, settings: SimulationSettings) -> None:
        alike = NodeKind(name="", nodes=settings.nodes, slots_per_node=settings.slots_per_node)
        self._kinds = {kind.name: kind for kind in settings.kinds or (alike,)}
        self._kind_of_node: dict[str, str] = {}
        self._autoscaler = None if settings.autoscale is None else Autoscaler(settings.autoscale)
        self._nodes: list[NodeSlots] = []
        self._nodes_created = 0
        self._since = 0.0
        self.node_hours = 0.0
        self.cost = 0.0
        self.most_slots = sum(kind.nodes * kind.slots_per_node for kind in self._kinds.values())
        if settings.autoscale is None:
            for kind in self._kinds.values():
                self._add(kind.name, kind.nodes, kind.slots_per_node)
            return
        self.most_slots = sum(offer.most_nodes * offer.slots for offer in settings.autoscale.offers)
        for offer in settings.autoscale.offers:
            self._kinds[offer.kind] = NodeKind(name=offer.kind, nodes=0, slots_per_node=offer.slots)
            self._add(offer.kind, offer.least_nodes, offer.slots)

    @property
    def slots(self) -> int:
        """Return the present number of slots, at least 1."""
        return max(1, sum(node.slots for node in self._nodes))

    def nodes(self) -> list[NodeSlots]:
        return list(self._nodes)

    def _add(self, kind: str, count: int, slots: int) -> None:
        width = max(2, len(str(count - 1)))
        for _ in range(count):
            name = f"{kind or 'n'}{self._nodes_created:0{width}}"
            self._nodes_created += 1
            self._nodes.append(NodeSlots(node=name, slots=slots, kind=kind))
            self._kind_of_node[name] = kind

    def kind_of(self, placement: Mapping[str, int]) -> NodeKind:
        """Return the slowest kind of those that a job is on."""
        names = {self._kind_of_node[node] for node in placement} or set(self._kinds)
        return min((self._kinds[name] for name in names), key=lambda kind: kind.speed)

    def advance(self, now: float) -> None:
        """Account for the nodes held since the last time."""
        hours = (now - self._since) / 3600.0
        self._since = now
        self.node_hours += hours * len(self._nodes)
        if self._autoscaler is not None:
            self.cost += hours * self._autoscaler.cost_per_hour(self._counts())

    def _counts(self) -> dict[str, int]:
        counts: dict[str, int] = {}
        for node in self._nodes:
            counts[node.kind] = counts.get(node.kind, 0) + 1
        return counts

    def follow(self, snapshot: Snapshot | None, now: float) -> bool:
        """Add or remove nodes as the autoscaler wants; whether anything changed."""
        if self._autoscaler is None or snapshot is None:
            return False
        held = {node for view in snapshot.trials for node in view.placement}
        before = list(self._nodes)
        present = self._counts()
        wanted = self._autoscaler.decide(snapshot, present, now)
        for offer in self._autoscaler.settings.offers:
            surplus = present.get(offer.kind, 0) - wanted[offer.kind]
            if surplus < 0:
                self._add(offer.kind, -surplus, offer.slots)
            for _ in range(surplus):
                # Free nodes go first, the newest among them.
                mine = [node for node in reversed(self._nodes) if node.kind == offer.kind]
                self._nodes.remove(min(mine, key=lambda node: node.node in held))
        return self._nodes != before
