"""Replicas on the slots of agents.

Concurrency: the control loop's thread makes all calls; the roster hears agents in the API's threads and wakes it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

from trials.agents.roster import Lost, Roster
from trials.agents.words import AgentReplica, Phase
from trials.errors import LaunchFailed
from trials.launch.base import Exit, Launcher, LaunchRequest, NodeSlots, ReplicaProcess
from trials.record import QueuedSlots, ReplicaRecord

ORPHAN_SECONDS = 10.0
"""A replica that no record names is ended when it is so old: its scheduler died before it had noted it."""
NODE_LOST = "node_lost"


class AgentLauncher(Launcher):
    """Launcher of replicas on the nodes of agents.

    ``look``: called at each look of the loop, to keep agents coming; ``end``: when no agent is wanted any more.
    ``queued``: slots whose agents are still to come.
    """

    def __init__(
        self,
        roster: Roster,
        *,
        look: Callable[[], None] = lambda: None,
        end: Callable[[], None] = lambda: None,
        queued: Callable[[], Sequence[QueuedSlots]] = lambda: (),
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._roster = roster
        self._look = look
        self._end = end
        self._queued = queued
        self._monotonic = monotonic
        self._orphans_since: dict[str, float] = {}

    def nodes(self) -> Sequence[NodeSlots]:
        return self._roster.nodes()

    def queued(self) -> Sequence[QueuedSlots]:
        return self._queued()

    def slot_environ(self, node: str, slot: int) -> Mapping[str, str]:
        return self._roster.slot_environ(node, slot)

    def launch(self, request: LaunchRequest) -> ReplicaProcess | None:
        """Tell the replica's agent to start it; ``started`` knows what came of it."""
        if not self._roster.order(request.node, request.slot, request.replica_id, request.to_json()):
            raise LaunchFailed(f"slot {request.slot} of {request.node} no longer exists")
        return None

    def started(self, replica_id: str) -> ReplicaProcess | None:
        state = self._roster.state_of(replica_id)
        if state is None:
            raise LaunchFailed(f"replica {replica_id} is not being started")
        if isinstance(state, Lost):
            raise LaunchFailed(state.why)
        if state.phase is Phase.REFUSED:
            raise LaunchFailed(state.why)
        return None if state.pid is None else ReplicaProcess(state.pid, state.process_started)

    def exits(self, replicas: Sequence[ReplicaRecord]) -> list[Exit]:
        self._look()
        self._roster.lose_silent()
        self._roster.end_lost()
        gone = [
            end
            for replica in replicas
            if replica.pid is not None and (end := self._end_of(replica.replica_id, replica.node))
        ]
        live = [replica.replica_id for replica in replicas]
        self._roster.note_ends(live)
        self._end_orphans(set(live))
        return gone

    def _end_of(self, replica_id: str, node: str) -> Exit | None:
        state: AgentReplica | Lost | None = self._roster.state_of(replica_id)
        if state is None:
            return Exit(replica_id, None, f"the process no longer exists on {node}", NODE_LOST)
        if isinstance(state, Lost):
            return Exit(replica_id, None, state.why, NODE_LOST)
        if state.is_over:
            return Exit(replica_id, state.status, state.why, state.code or "out_of_memory")
        return None

    def _end_orphans(self, wanted: set[str]) -> None:
        now = self._monotonic()
        orphans = self._roster.running().keys() - wanted
        self._orphans_since = {name: self._orphans_since.get(name, now) for name in orphans}
        for name, since in self._orphans_since.items():
            if now - since >= ORPHAN_SECONDS:
                self._roster.stop(name, force=True)

    def cpu_seconds(self, replica: ReplicaRecord) -> float | None:
        return self._roster.cpu_seconds(replica.replica_id)

    def stop(self, replica: ReplicaRecord, *, force: bool) -> None:
        self._roster.stop(replica.replica_id, force=force)

    def close(self) -> None:
        self._end()
