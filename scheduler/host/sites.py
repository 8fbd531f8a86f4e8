"""This machine as the place of a scheduler's slots."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from scheduler.api.site import Site
from scheduler.errors import SchedulerError
from scheduler.snapshot import NodeView
from trials.agents.own_slots import own_slots
from trials.launch import LocalLauncher
from trials.launch.emulated import Emulation, emulated_slots
from trials.launch.fork.start import StartedForkServer
from trials.launch.gpus import Nvml
from trials.launch.node_environ import node_environ
from trials.launch.slots import Slot, numa_nodes, usable_cores

SECRETS = frozenset({"ELASTUNE_DATABASE", "ELASTUNE_TOKEN", "ELASTUNE_URL", "PGPASSWORD", "PGPASSFILE"})
"""Variables that replicas do not inherit: they may open their own trial only."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineSettings:
    slots: int | None = None
    """None: one per GPU, or per CPU core where there is no GPU."""
    slots_per_gpu: int = 1
    gpus_per_slot: int = 1
    """GPUs in a slot, for models that their own code spreads over several: one process has all of a slot's."""
    memory_per_slot: float | None = None
    """GiB that a replica may use; None: all that the machine has."""
    fork_server: StartedForkServer | None = None
    """None: replicas start cold."""
    emulate: Emulation | None = None
    """Devices that the slots stand for, instead of this machine's own."""


class MachineSite(Site):
    is_one_machine = True

    def __init__(self, settings: MachineSettings) -> None:
        gpus = Nvml()
        self._local = LocalLauncher(
            slots=_slots(settings, gpus),
            gpus=gpus,
            memory_bytes=None if settings.memory_per_slot is None else int(settings.memory_per_slot * 2**30),
            fork_server=settings.fork_server or False,
        )
        super().__init__(self._local)
        self.emulated = "" if settings.emulate is None else settings.emulate.sentence
        self._nodes = super().nodes()

    def environ(self, *, is_shared: bool) -> dict[str, str]:
        """Return the replicas' environment: all but secrets, or only the machine's variables on a shared scheduler."""
        own = without_secrets(os.environ)
        return node_environ(own) if is_shared else own

    def nodes(self) -> tuple[NodeView, ...]:
        return self._nodes

    def call_on_change(self, wake: Callable[[], None]) -> None:
        self._local.on_change = wake


def _slots(settings: MachineSettings, gpus: Nvml) -> tuple[Slot, ...]:
    if settings.emulate is not None:
        return emulated_slots(settings.emulate)
    gpus_here = gpus.gpus()
    if gpus_here and len(gpus_here) < settings.gpus_per_slot:
        raise SchedulerError(
            f"gpus_per_slot is {settings.gpus_per_slot} but this machine has {len(gpus_here)} GPUs; lower it"
        )
    return own_slots(
        "localhost",
        os.environ,
        gpus_here,
        usable_cores(),
        numa_nodes(),
        most=settings.slots,
        per_gpu=settings.slots_per_gpu,
        gpus_each=settings.gpus_per_slot,
    )


def without_secrets(environ: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environ.items() if name not in SECRETS}
