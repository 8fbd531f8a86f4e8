"""The simulated cluster: what nodes there are, and how they come and go with demand."""

from __future__ import annotations

from dataclasses import dataclass

from scheduler.allocation.autoscale import Autoscaler, AutoscaleSettings
from scheduler.simulator.replicas import Timing
from scheduler.simulator.training import Request
from scheduler.snapshot import Snapshot
from trials.launch.base import NodeSlots


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationSettings:
    nodes: int = 16
    slots_per_node: int = 4
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
        self._autoscaler = None if settings.autoscale is None else Autoscaler(settings.autoscale)
        self._node_slots = settings.slots_per_node
        self._nodes: list[NodeSlots] = []
        self._nodes_created = 0
        self._since = 0.0
        self.node_hours = 0.0
        first = most = settings.nodes
        if settings.autoscale is not None:
            self._node_slots = settings.autoscale.slots
            first, most = settings.autoscale.least_nodes, settings.autoscale.most_nodes
        self.most_slots = most * self._node_slots
        self._add(first)

    @property
    def slots(self) -> int:
        """Return the present number of slots, at least 1."""
        return max(1, sum(node.slots for node in self._nodes))

    def nodes(self) -> list[NodeSlots]:
        return list(self._nodes)

    def _add(self, count: int) -> None:
        width = max(2, len(str(count - 1)))
        for _ in range(count):
            self._nodes.append(NodeSlots(node=f"n{self._nodes_created:0{width}}", slots=self._node_slots))
            self._nodes_created += 1

    def advance(self, now: float) -> None:
        """Account for the nodes held since the last time."""
        self.node_hours += (now - self._since) / 3600.0 * len(self._nodes)
        self._since = now

    def follow(self, snapshot: Snapshot | None, now: float) -> bool:
        """Add or remove nodes as the autoscaler wants; whether anything changed."""
        if self._autoscaler is None or snapshot is None:
            return False
        held = {node for view in snapshot.trials for node in view.placement}
        before = list(self._nodes)
        surplus = len(before) - self._autoscaler.decide(snapshot, len(before), now)
        self._add(-surplus)
        for _ in range(surplus):
            # Free nodes go first, the newest among them.
            self._nodes.remove(min(reversed(self._nodes), key=lambda node: node.node in held))
        return self._nodes != before
