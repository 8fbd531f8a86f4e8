"""The contract of a launcher. Every call can be repeated; none waits for a replica to do anything."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from trials.errors import LaunchFailed
from trials.record import QueuedSlots, ReplicaRecord, SlotQuota


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeSlots:
    """A machine and how many replicas it has room for."""

    node: str
    slots: int
    kind: str = ""
    """Kind of its slots (a GPU's model, a part of one), where they are not all alike."""
    reserved_for: tuple[str, ...] = ()
    """Studies that alone may use it; empty: all may."""
    jobs: Mapping[int, str] = field(default_factory=dict)
    """Job of a queue that each slot came with, by number."""
    in_use: frozenset[int] = frozenset()
    """Slots, by number, that somebody else works on: nothing new is started there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchRequest:
    """One replica to start: a pure description, made before anything is touched."""

    replica_id: str
    trial_id: str
    study: str = ""
    node: str
    slot: int
    entrypoint: str
    environ: Mapping[str, str]
    """Complete environment of the process."""
    working_dir: str
    python_path: tuple[str, ...]
    preload: tuple[str, ...]
    code: tuple[str, ...]
    log: Path
    """Standard output and error go here."""
    image: str = ""
    package: str = ""
    moved_to: str = ""
    """As in the trial's spec."""

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "environ": dict(self.environ), "log": str(self.log)}


@dataclass(frozen=True, slots=True)
class ReplicaProcess:
    """A started process, named by pid and start time."""

    pid: int
    started: float


NO_ROOM = "no_room"
"""Code of an `Exit`: the replica never ran, because somebody else has what its slot stands for."""


@dataclass(frozen=True, slots=True)
class Exit:
    """A replica that is gone; ``status`` is None when it was not our child, negative for a signal."""

    replica_id: str
    status: int | None
    why: str = ""
    """Reason that the machine knows, such as that it was out of memory."""
    code: str = "out_of_memory"
    """Kind of what ``why`` says, for programs."""


class Launcher:
    def nodes(self) -> Sequence[NodeSlots]:
        raise NotImplementedError

    def quotas(self, trial_id: str) -> Sequence[SlotQuota]:
        """Limits on what the trial's pods or processes may use that are not its study's."""
        return ()

    def queued(self) -> Sequence[QueuedSlots]:
        """Slots that are on their way, or why none are."""
        return ()

    def slot_environ(self, node: str, slot: int) -> Mapping[str, str]:
        raise NotImplementedError

    def is_ready_for(self, request: LaunchRequest) -> bool:
        """Tell whether to start this replica now; if not, something that makes it quicker is on its way: ask again."""
        return True

    def launch(self, request: LaunchRequest) -> ReplicaProcess | None:
        """Start a replica; raises LaunchFailed. None: that takes a while, and `started` tells what came of it."""
        raise NotImplementedError

    def started(self, replica_id: str) -> ReplicaProcess | None:
        """Return the process of a replica that `launch` could not tell yet; None while it is unknown.

        Raises LaunchFailed where it could not be started.
        """
        raise LaunchFailed(f"replica {replica_id} is not being started")

    def exits(self, replicas: Sequence[ReplicaRecord]) -> list[Exit]:
        """Return which of these replicas no longer run."""
        raise NotImplementedError

    def cpu_seconds(self, replica: ReplicaRecord) -> float | None:
        """CPU time that the replica's process has used, as of some seconds ago; None where that cannot be told."""
        return None

    def stop(self, replica: ReplicaRecord, *, force: bool) -> None:
        """Ask a replica to save and leave, or (``force``) end it and its children now."""
        raise NotImplementedError

    def collect_log(self, replica: ReplicaRecord, file: Path) -> None:
        """Bring what a replica has printed into its log file, where it does not write there itself."""

    def close(self) -> None:
        """Let go of what the launcher itself holds; replicas keep running."""
