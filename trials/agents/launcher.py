"""Replicas on the slots of agents.

Concurrency: the control loop's thread makes all calls; the roster hears agents in the API's threads and wakes it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from trials.agents.roster import Lost, Roster
from trials.agents.words import AgentReplica, Phase
from trials.errors import LaunchFailed
from trials.launch.base import Exit, LaunchRequest, NodeSlots, ReplicaProcess
from trials.queued import QueuedSlots, SlotQuota
from trials.record import ReplicaRecord

ORPHAN_SECONDS = 10.0
"""A replica that no record names is ended when it is so old: its scheduler died before it had noted it."""
NODE_LOST = "node_lost"


class AgentLauncher:
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

    def quotas(self, trial_id: str) -> Sequence[SlotQuota]:
        return ()

    def queued(self) -> Sequence[QueuedSlots]:
        return self._queued()

    def slot_environ(self, node: str, slot: int) -> Mapping[str, str]:
        return self._roster.slot_environ(node, slot)

    def is_ready_for(self, request: LaunchRequest) -> bool:
        return True

    def launch(self, request: LaunchRequest) -> ReplicaProcess | None:
        """Its agent is told; `started` knows what came of it."""
        if not self._roster.order(request.node, request.slot, request.replica_id, request.to_json()):
            raise LaunchFailed(f"slot {request.slot} of {request.node} no longer exists")
        return None

    def started(self, replica_id: str) -> ReplicaProcess | None:
        found = self._roster.state_of(replica_id)
        if found is None:
            raise LaunchFailed(f"replica {replica_id} is not being started")
        if isinstance(found, Lost):
            raise LaunchFailed(found.why)
        if found.phase is Phase.REFUSED:
            raise LaunchFailed(found.why)
        return None if found.pid is None else ReplicaProcess(found.pid, found.process_started)

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
        found: AgentReplica | Lost | None = self._roster.state_of(replica_id)
        if found is None:
            return Exit(replica_id, None, f"the process no longer exists on {node}", NODE_LOST)
        if isinstance(found, Lost):
            return Exit(replica_id, None, found.why, NODE_LOST)
        if found.is_over:
            return Exit(replica_id, found.status, found.why, found.code or "out_of_memory")
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

    def collect_log(self, replica: ReplicaRecord, file: Path) -> None:
        """Agents that share the scheduler's files have their replicas write into it themselves."""

    def close(self) -> None:
        self._end()
