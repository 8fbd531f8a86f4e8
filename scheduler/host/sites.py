"""Site: where the slots are that a scheduler gives out, and what runs replicas on them."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from scheduler.errors import SchedulerError
from scheduler.loop.control_loop import ControlLoop
from scheduler.snapshot import JobView, NodeView
from trials.agents.own_slots import own_slots
from trials.agents.roster import Roster
from trials.launch import LocalLauncher
from trials.launch.base import Launcher
from trials.launch.devices import numa_nodes, usable_cores
from trials.launch.emulated import Emulation, emulated_slots
from trials.launch.fork.start import StartedForkServer
from trials.launch.gpus import Nvml
from trials.launch.node_environ import node_environ
from trials.launch.slots import Slot
from trials.store import TrialStore

SECRETS = frozenset({"ELASTUNE_DATABASE", "ELASTUNE_TOKEN", "ELASTUNE_URL", "PGPASSWORD", "PGPASSFILE"})
"""What replicas do not inherit: they may open their own trial only."""


class Site(Protocol):
    @property
    def launcher(self) -> Launcher: ...

    @property
    def roster(self) -> Roster | None:
        """Of agents that call, where replicas run on other machines."""
        ...

    @property
    def grows(self) -> bool:
        """Whether it may get more slots than it has now."""
        ...

    @property
    def runs_elsewhere(self) -> bool:
        """Whether replicas share no files with this machine, so that code has to be brought to them."""
        ...

    @property
    def most_slots(self) -> int:
        """So many may come to be at a time; 0 where it is what there is."""
        ...

    @property
    def emulated(self) -> str:
        """A sentence where slots stand for devices that are not there; else empty."""
        ...

    def environ(self, *, is_shared: bool) -> dict[str, str]:
        """What replicas inherit of this process's environment."""
        ...

    def nodes(self) -> tuple[NodeView, ...]: ...

    def queue(self) -> tuple[JobView, ...]:
        """Jobs with which slots come, where a queue gives them."""
        ...

    def held_hours(self) -> float | None:
        """Slot hours that such jobs have been there for; None where there are none."""
        ...

    def queue_trouble(self) -> str:
        """Why no more of them are asked for, for people."""
        ...

    def call_on_change(self, wake: Callable[[], None]) -> None:
        """Have ``wake`` called, from any thread, when the loop had better look."""
        ...

    def begin(self, store: TrialStore, loop: ControlLoop, url: str, agents_token: str) -> None:
        """The scheduler is about to answer at this address."""
        ...

    def wait_until_there(self) -> None:
        """For the first slots, where they take a moment to come. Raises SchedulerError where they do not."""
        ...

    def drain(self) -> None:
        """The scheduler is told to end: what cannot run on without it saves and leaves, as long as it still answers."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineSettings:
    slots: int | None = None
    """None: one per GPU, or per CPU core where there is no GPU."""
    slots_per_gpu: int = 1
    gpus_per_slot: int = 1
    """For models that their own code spreads over several: one process has all of a slot's."""
    memory_per_slot: float | None = None
    """GiB that a replica may use; None: all that the machine has."""
    fork_server: StartedForkServer | None = None
    """None: replicas start cold."""
    emulate: Emulation | None = None
    """Devices that the slots stand for, instead of this machine's own."""


class MachineSite:
    """This machine."""

    def __init__(self, settings: MachineSettings) -> None:
        gpus = Nvml()
        self.launcher = LocalLauncher(
            slots=_slots(settings, gpus),
            gpus=gpus,
            memory_bytes=None if settings.memory_per_slot is None else int(settings.memory_per_slot * 2**30),
            fork_server=settings.fork_server or False,
        )
        self.roster = None
        self.grows = False
        self.most_slots = 0
        self.runs_elsewhere = False
        self.emulated = "" if settings.emulate is None else settings.emulate.sentence
        self._nodes = tuple(
            NodeView(name=node.node, slots=node.slots, kind=node.kind) for node in self.launcher.nodes()
        )

    def environ(self, *, is_shared: bool) -> dict[str, str]:
        """Of one's own scheduler all but its secrets; of one that is shared what belongs to the machine."""
        own = without_secrets(os.environ)
        return node_environ(own) if is_shared else own

    def nodes(self) -> tuple[NodeView, ...]:
        return self._nodes

    def queue(self) -> tuple[JobView, ...]:
        return ()

    def held_hours(self) -> float | None:
        return None

    def queue_trouble(self) -> str:
        return ""

    def call_on_change(self, wake: Callable[[], None]) -> None:
        self.launcher.on_change = wake

    def begin(self, store: TrialStore, loop: ControlLoop, url: str, agents_token: str) -> None:
        """Its slots are there already."""

    def wait_until_there(self) -> None:
        """They are."""

    def drain(self) -> None:
        """Replicas run on, for the next scheduler to adopt, until their leases run out."""


def _slots(settings: MachineSettings, gpus: Nvml) -> tuple[Slot, ...]:
    if settings.emulate is not None:
        return emulated_slots(settings.emulate)
    known = gpus.gpus()
    if known and len(known) < settings.gpus_per_slot:
        raise SchedulerError(
            f"gpus_per_slot is {settings.gpus_per_slot} and this machine has {len(known)} GPUs; take fewer for a slot"
        )
    return own_slots(
        "localhost",
        os.environ,
        known,
        usable_cores(),
        numa_nodes(),
        most=settings.slots,
        per_gpu=settings.slots_per_gpu,
        gpus_each=settings.gpus_per_slot,
    )


def without_secrets(environ: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environ.items() if name not in SECRETS}
