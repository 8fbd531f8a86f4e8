"""A launcher without processes, for tests and the simulator: replicas are entries that the caller ends as it likes."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

from trials.errors import LaunchFailed
from trials.launch.base import Exit, Launcher, LaunchRequest, NodeSlots, ReplicaProcess
from trials.record import ReplicaRecord


class InMemoryLauncher(Launcher):
    def __init__(self, nodes: Mapping[str, int] | Sequence[NodeSlots]) -> None:
        if isinstance(nodes, Mapping):
            nodes = [NodeSlots(node=name, slots=slots) for name, slots in nodes.items()]
        self._nodes = tuple(nodes)
        self._pids = itertools.count(1)
        self.running: dict[str, LaunchRequest] = {}
        self.stopped: list[tuple[str, bool]] = []
        """(replica id, force) of every stop that was asked for."""
        self.refuse: str | None = None
        """Set to make every launch fail with these words."""
        self.hangs = False
        """While set, launches take their time."""
        self.cpu: dict[str, float] = {}
        """CPU seconds of each replica, as far as anybody can tell."""
        self._ended: dict[str, Exit] = {}

    def nodes(self) -> Sequence[NodeSlots]:
        return self._nodes

    def replace_nodes(self, nodes: Sequence[NodeSlots]) -> None:
        """Replace the nodes: the cluster has become another one."""
        self._nodes = tuple(nodes)

    def slot_environ(self, node: str, slot: int) -> Mapping[str, str]:
        return {"ELASTUNE_TEST_SLOT": f"{node}/{slot}"}

    def launch(self, request: LaunchRequest) -> ReplicaProcess | None:
        if self.refuse is not None:
            raise LaunchFailed(self.refuse)
        self.running[request.replica_id] = request
        return None if self.hangs else ReplicaProcess(next(self._pids), 0.0)

    def started(self, replica_id: str) -> ReplicaProcess | None:
        if self.hangs:
            return None
        if self.refuse is not None:
            self.running.pop(replica_id, None)
            raise LaunchFailed(self.refuse)
        return ReplicaProcess(next(self._pids), 0.0)

    def end(self, replica_id: str, status: int | None = 0, why: str = "", code: str = "out_of_memory") -> None:
        self.running.pop(replica_id, None)
        self._ended[replica_id] = Exit(replica_id, status, why, code)

    def exits(self, replicas: Sequence[ReplicaRecord]) -> list[Exit]:
        gone = []
        for replica in replicas:
            if replica.replica_id in self._ended:
                gone.append(self._ended.pop(replica.replica_id))
            elif replica.pid is not None and replica.replica_id not in self.running:
                gone.append(Exit(replica.replica_id, None))
        return gone

    def cpu_seconds(self, replica: ReplicaRecord) -> float | None:
        return self.cpu.get(replica.replica_id)

    def stop(self, replica: ReplicaRecord, *, force: bool) -> None:
        self.stopped.append((replica.replica_id, force))
        if force and replica.replica_id in self.running:
            self.end(replica.replica_id, -9)

    def close(self) -> None:
        self.running.clear()
