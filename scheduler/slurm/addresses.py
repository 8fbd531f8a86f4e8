"""Address of this machine by which a cluster's nodes reach it."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Sequence

from scheduler.errors import SchedulerError
from trials.agents.addresses import address_of, address_towards
from trials.errors import SlurmRefused, SlurmUnreachable
from trials.slurm.commands import Slurm

MOST_NODES = 8
"""Most nodes that are tried."""


def address_for(slurm: Slurm, nodes: Sequence[str], interface: str) -> str:
    """The interface's where one is named; else the one on the way to the first of these that is known.

    Raises SchedulerError where there is none.
    """
    try:
        if interface:
            return address_of(interface)
        shown = slurm.run("scontrol", "--oneliner", "show", "node", ",".join(nodes[:MOST_NODES]))
        known = re.findall(r"\bNodeAddr=(\S+)", shown) or list(nodes[:MOST_NODES])
        for address in known[:-1]:
            # Nodes of a cloud have no name before they are there.
            with contextlib.suppress(OSError):
                return address_towards(address)
        return address_towards(known[-1])
    except (OSError, SlurmRefused, SlurmUnreachable) as error:
        raise SchedulerError(
            f"cannot find the address by which the nodes reach this machine: {error}; name the address to listen on "
            "with --host, or a network interface that leads there with --interface"
        ) from error
