"""Messages of agents: whole states, never changes, so that every message may be lost or repeated."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

AGENT_VARIABLE = "ELASTUNE_AGENT"
"""Tells an agent what it is, as JSON; it takes the variable away before it starts anything."""
MOST_SLOTS = 4096
MOST_REPLICAS = 2 * MOST_SLOTS


class Phase(str, enum.Enum):
    __str__ = str.__str__
    STARTING = "starting"
    RUNNING = "running"
    ENDED = "ended"
    REFUSED = "refused"
    """It could not be started; ``why`` tells."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentReplica:
    phase: Phase
    pid: int | None = None
    process_started: float = 0.0
    status: int | None = None
    why: str = ""
    code: str = ""

    @property
    def is_over(self) -> bool:
        return self.phase in (Phase.ENDED, Phase.REFUSED)


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentSlot:
    kind: str = ""
    environ: Mapping[str, str] = field(default_factory=dict)
    """Variables that confine a replica to it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class News:
    """All that an agent has to say."""

    agent: str
    """Its own name, another one for each process."""
    host: str
    """The machine, as whoever gave it out calls it: agents of one host make one node."""
    version: int
    """Counts what it has to say: of two, the higher is the later one."""
    job: str = ""
    """Job of the queue that it came with."""
    step: str = ""
    """Step of that job, where it is one."""
    pool: str = ""
    """Partition of the cluster that it is in."""
    slots: tuple[AgentSlot, ...]
    numbers: tuple[int, ...] = ()
    """Numbers of its slots in their node, as it was told; empty before."""
    replicas: Mapping[str, AgentReplica] = field(default_factory=dict)
    cpu_seconds: Mapping[str, float] = field(default_factory=dict)
    """CPU time that each replica's process has used when this is said; no version counts it."""
    in_use: frozenset[int] = frozenset()
    """Its slots, by their order here, that somebody else works on."""
    leaves: str = ""
    """Why it starts nothing more and is about to end; empty as long as it stays."""
    shares_files: bool = True
    """True if it sees the scheduler's state folder; nothing is started where nobody could read what it writes."""

    def __post_init__(self) -> None:
        if len(self.slots) > MOST_SLOTS or len(self.replicas) > MOST_REPLICAS:
            raise ValueError(
                f"an agent has {len(self.slots)} slots and {len(self.replicas)} replicas; it must have at most "
                f"{MOST_SLOTS} slots and {MOST_REPLICAS} replicas"
            )
        if not self.agent or not self.host:
            raise ValueError("an agent must have a name and a host")


@dataclass(frozen=True, slots=True, kw_only=True)
class Orders:
    """All that an agent is to do, beside what it is known to have done."""

    roster: str = ""
    """Whose they are: another name after each start of the scheduler."""
    version: int = 0
    """A higher number when there is something more to do."""
    numbers: tuple[int, ...] = ()
    launch: tuple[Mapping[str, Any], ...] = ()
    """Requests as plain JSON."""
    stop: Mapping[str, bool] = field(default_factory=dict)
    """Replicas that are to end, and whether by force."""
    noted: tuple[str, ...] = ()
    """Replicas whose end is known and need not be told any more."""
    end: str = ""
    """Why it is not wanted any more: its replicas are to leave, and so is it; empty as long as it is."""
