"""By which address of this machine the nodes of a cluster reach it."""

from __future__ import annotations

import re

from scheduler.errors import SchedulerError
from trials.agents.addresses import address_of, address_towards
from trials.errors import SlurmRefused, SlurmUnreachable
from trials.slurm.commands import Slurm


def address_for(slurm: Slurm, node: str, interface: str) -> str:
    """The interface's where one is named; else the one on the way to this node. Raises SchedulerError."""
    try:
        if interface:
            return address_of(interface)
        shown = slurm.run("scontrol", "--oneliner", "show", "node", node)
        found = re.search(r"\bNodeAddr=(\S+)", shown)
        return address_towards(found[1] if found else node)
    except (OSError, SlurmRefused, SlurmUnreachable) as error:
        raise SchedulerError(
            f"it is not clear by which address the nodes reach this machine: {error}; name the one to listen on with "
            "--host, or a network interface that leads there with --interface"
        ) from error
