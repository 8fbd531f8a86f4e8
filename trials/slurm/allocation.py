"""Slurm allocation that this process runs in, if any, from its environment."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Allocation:
    job: str
    nodes: tuple[str, ...]
    pool: str
    """Its partition."""
    here: str
    """Node that this process is on; empty where it is on none, as in a shell of `salloc`."""

    @property
    def is_this_machine(self) -> bool:
        """Tell whether all of it is where this process runs: then no other node has to be reached."""
        return self.nodes == (self.here,)


ORDINARY_STEPS = 0xFFFFFFF0
"""Higher numbers are those of a job's script and of the shell of `salloc`, which speak for all of the job."""


def allocation(environ: Mapping[str, str], hostnames: Callable[[str], list[str]]) -> Allocation | None:
    """Return the allocation that this process runs in, or None; ``hostnames`` expands Slurm's short form of nodes.

    In a step that `srun` has started it is the step's nodes: the others may be other
    steps'.
    """
    job = environ.get("SLURM_JOB_ID", "")
    listed = environ.get("SLURM_JOB_NODELIST") or environ.get("SLURM_NODELIST") or ""
    step = environ.get("SLURM_STEP_ID", "")
    if step.isdigit() and int(step) < ORDINARY_STEPS:
        listed = environ.get("SLURM_STEP_NODELIST") or listed
    if not job or not listed:
        return None
    # A container may lack Slurm's commands.
    nodes = tuple(hostnames(listed)) if "[" in listed or "," in listed else (listed,)
    here = environ.get("SLURMD_NODENAME", "")
    return Allocation(job, nodes, environ.get("SLURM_JOB_PARTITION", ""), here if here in nodes else "")
