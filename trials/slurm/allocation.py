"""Which allocation of Slurm this process runs in, if any: from what Slurm has put into its environment."""

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
    """Which of its nodes this process is on; empty where it is on none, as in a shell of `salloc`."""

    @property
    def is_this_machine(self) -> bool:
        """Whether all of it is where this process runs: then no other node has to be reached."""
        return self.nodes == (self.here,)


def allocation(environ: Mapping[str, str], hostnames: Callable[[str], list[str]]) -> Allocation | None:
    """``hostnames``: the nodes that Slurm's short form stands for. None outside of any allocation."""
    job = environ.get("SLURM_JOB_ID", "")
    listed = environ.get("SLURM_JOB_NODELIST") or environ.get("SLURM_NODELIST") or ""
    if not job or not listed:
        return None
    nodes = tuple(hostnames(listed))
    here = environ.get("SLURMD_NODENAME", "")
    return Allocation(job, nodes, environ.get("SLURM_JOB_PARTITION", ""), here if here in nodes else "")
