"""Whose slots `elastune up` gives out: this machine's, or those of the allocation of Slurm that it runs in."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING

from scheduler.errors import SchedulerError
from scheduler.host.hosts import ANY

if TYPE_CHECKING:
    from scheduler.api.site import Site
    from scheduler.slurm.agents import AgentSettings

LOOPBACK = "127.0.0.1"
LEAVE_AT_ONCE = "replicas save their state and leave at once"


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """Options of the command line about slots."""

    state_dir: Path
    slots: int | None
    slots_per_gpu: int
    gpus_per_slot: int
    memory_per_slot: float | None
    host: str | None
    fork_server: bool
    emulate: str | None
    embedded: bool
    preload: str
    interface: str
    prologue: str
    container: str
    use_slurm: bool
    shares_files: bool
    pool: str | None
    """Pool of Slurm's jobs, as it was described; None for none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chosen:
    make: Callable[[], Site]
    host: str
    """Address to listen on."""
    reached_at: str = ""
    """Address by which nodes reach it, where that is another one."""
    sentence: str
    """Sentence that people should know; may be empty."""
    at_the_end: str = "replicas save their state and leave when their lease runs out"
    """Fate of the replicas when the scheduler is told to end."""
    close: Callable[[], None] = lambda: None


def choose_site(wanted: Wanted) -> Chosen:
    """Choose the site; raise SchedulerError for options that contradict each other or cannot be had."""
    if wanted.slots_per_gpu > 1 and wanted.gpus_per_slot > 1:
        raise SchedulerError(
            f"--slots-per-gpu is {wanted.slots_per_gpu} and --gpus-per-slot is {wanted.gpus_per_slot}; a slot is "
            "either a part of a GPU or several GPUs: leave one of them out"
        )
    if wanted.pool is not None:
        return _pool(wanted, wanted.pool)
    if wanted.use_slurm and "SLURM_JOB_ID" in os.environ and not _has_shape(wanted.emulate) and wanted.slots is None:
        chosen = _in_allocation(wanted)
        if chosen is not None:
            return chosen
    return _machine(wanted)


def _has_shape(emulate: str | None) -> bool:
    """Tell whether ``emulate`` gives nodes and slots of its own (``4x8``), instead of an allocation's."""
    return emulate is not None and emulate.partition(":")[0].replace("x", "", 1).isdigit()


def _machine(wanted: Wanted) -> Chosen:
    from trials.launch.emulated import emulation
    from trials.launch.fork.start import stages_for, start_fork_server
    from trials.launch.node_environ import node_environ

    devices = None if wanted.emulate is None else emulation(wanted.emulate, slots=wanted.slots)
    # It imports what replicas need while this process imports what a scheduler needs.
    inherited = None if wanted.embedded else node_environ(os.environ)
    started = start_fork_server(stages_for(wanted.preload.split(",")), inherited) if wanted.fork_server else None

    def make() -> Site:
        from scheduler.host.sites import MachineSettings, MachineSite

        return MachineSite(
            MachineSettings(
                slots=wanted.slots,
                slots_per_gpu=wanted.slots_per_gpu,
                gpus_per_slot=wanted.gpus_per_slot,
                memory_per_slot=wanted.memory_per_slot,
                fork_server=started,
                emulate=devices,
            )
        )

    return Chosen(
        make=make,
        host=wanted.host or LOOPBACK,
        sentence="" if devices is None else devices.sentence,
        close=started.close if started is not None else lambda: None,
    )


def _in_allocation(wanted: Wanted) -> Chosen | None:
    """Choose the site for all nodes of this Slurm job; None if the job has this node only."""
    from scheduler.slurm.agents import address_for
    from scheduler.slurm.allocation_site import AllocationSite
    from trials.errors import SlurmRefused, SlurmUnreachable
    from trials.slurm.commands import Slurm, allocation

    slurm = Slurm()
    try:
        job = allocation(os.environ, slurm.hostnames)
    except (SlurmRefused, SlurmUnreachable) as error:
        raise SchedulerError(
            f"cannot list the nodes of Slurm job {os.environ['SLURM_JOB_ID']}: {error}; `--no-slurm` uses this "
            "machine alone"
        ) from error
    if job is None or job.is_this_machine:
        return None
    elsewhere = next(node for node in job.nodes if node != job.here)
    reached = _named_address(wanted) or address_for(slurm, [elsewhere], wanted.interface)
    settings = _agent_settings(wanted)
    return Chosen(
        make=lambda: AllocationSite(slurm, job, settings),
        host=wanted.host or reached,
        reached_at=reached,
        at_the_end=LEAVE_AT_ONCE,
        sentence=f"Slurm job {job.job}: {len(job.nodes)} nodes, {', '.join(job.nodes)}",
    )


def _pool(wanted: Wanted, text: str) -> Chosen:
    from scheduler.slurm.agents import address_for
    from scheduler.slurm.pool_settings import pool_settings
    from scheduler.slurm.pool_site import PoolSite
    from trials.agents.agent import LEAVE_SECONDS
    from trials.errors import SlurmRefused, SlurmUnreachable
    from trials.slurm.commands import Slurm

    if wanted.slots is not None or _has_shape(wanted.emulate):
        raise SchedulerError("--slurm sets the number of slots (slots=0:32); leave out --slots and NODESxSLOTS")
    pool = pool_settings(text, gpus_per_slot=wanted.gpus_per_slot, slots_per_gpu=wanted.slots_per_gpu)
    slurm = Slurm()
    reached = _named_address(wanted)
    if reached is None:
        try:
            names = slurm.run("sinfo", "--noheader", "--Node", "--format=%N", *_of_partition(pool.options)).split()
        except (SlurmRefused, SlurmUnreachable) as error:
            raise SchedulerError(f"cannot take slots from Slurm: {error}") from error
        # A partition that is not there is refused with Slurm's words when jobs are tried out.
        reached = address_for(slurm, names, wanted.interface) if names else LOOPBACK
    return Chosen(
        make=lambda: PoolSite(slurm, pool, _agent_settings(wanted, max(LEAVE_SECONDS, pool.warn_seconds))),
        host=wanted.host or reached,
        reached_at=reached,
        at_the_end=f"{LEAVE_AT_ONCE}, and no job is left in the queue",
        sentence=f"slots come from Slurm, {pool.where}: {pool.least_slots} to {pool.most_slots} as trials can use them",
    )


def _named_address(wanted: Wanted) -> str | None:
    return wanted.host if wanted.host and wanted.host not in ANY else None


def _of_partition(options: Mapping[str, str | None]) -> list[str]:
    named = options.get("partition")
    return [] if named is None else [f"--partition={named}"]


def _agent_settings(wanted: Wanted, leave_seconds: float | None = None) -> AgentSettings:
    from scheduler.slurm.agents import AgentSettings, container_options
    from trials.agents.agent import LEAVE_SECONDS
    from trials.agents.start import AgentOptions

    same = [each.name for each in fields(AgentOptions) if each.name != "leave_seconds"]
    return AgentSettings(
        state_dir=wanted.state_dir,
        memory_per_slot=wanted.memory_per_slot,
        prologue=wanted.prologue,
        container=container_options(wanted.container),
        is_shared=not wanted.embedded,
        leave_seconds=leave_seconds or LEAVE_SECONDS,
        **{name: getattr(wanted, name) for name in same},
    )
