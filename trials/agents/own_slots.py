"""Slots of a machine that somebody gave us, a pure plan, and the addresses at which the machine is reached.

Its GPUs as its driver tells them; where it does not, those that the queue has set aside; without any, the cores that
the queue has set aside.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from dataclasses import replace

import psutil

from trials.launch.emulated import emulation
from trials.launch.gpus import Gpu
from trials.launch.slots import Slot, divide


def own_slots(
    host: str,
    environ: Mapping[str, str],
    gpus: Sequence[Gpu],
    cores: Sequence[int],
    numa_nodes: Sequence[Sequence[int]] = (),
    *,
    most: int | None = None,
    per_gpu: int = 1,
    gpus_each: int = 1,
) -> tuple[Slot, ...]:
    """Divide this node into slots, at most ``most``."""
    given = environ.get("SLURM_CPUS_ON_NODE", "")
    known = list(gpus) or [Gpu(uuid=index, model="") for index in _given_gpus(environ)]
    count = most if known or most else int(given) if given.isdigit() else None
    return divide(host, known, cores, numa_nodes, slots=count, per_gpu=per_gpu, gpus_each=gpus_each)


def of_one_kind(slots: Sequence[Slot]) -> tuple[Slot, ...]:
    """Return the slots of the kind that are most; to a scheduler of its own, such a machine is several nodes."""
    kinds = [slot.kind for slot in slots]
    kind = max(dict.fromkeys(kinds), key=kinds.count)
    node = slots[0].node
    return tuple(replace(slot, node=node) for slot in slots if slot.kind == kind)


def emulating(slots: Sequence[Slot], profile: str) -> tuple[Slot, ...]:
    """Make as many slots that stand for devices which are not there."""
    text = emulation(profile, slots=len(slots)).profile.to_text()
    return tuple(Slot(node=slot.node, emulates=text) for slot in slots)


def _given_gpus(environ: Mapping[str, str]) -> list[str]:
    """Return the GPUs that a queue names, for a machine whose driver does not."""
    if not any(name in environ for name in ("SLURM_STEP_GPUS", "SLURM_JOB_GPUS")):
        return []
    # AMD's runtime counts CUDA_VISIBLE_DEVICES among those that this one leaves.
    left = environ.get("ROCR_VISIBLE_DEVICES", "")
    if left:
        return [str(index) for index in range(len(left.split(",")))]
    return [word.strip() for word in environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if word.strip()]


def address_towards(host: str) -> str:
    """Return this machine's address on the way to ``host``; raise OSError where no way leads there."""
    try:
        known = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)
        family, kind, _, _, where = min(known, key=lambda each: each[0] != socket.AF_INET)
        with socket.socket(family, kind) as probe:
            # Sends nothing: the system only looks up the way.
            probe.connect(where)
            return str(probe.getsockname()[0])
    except OSError as error:
        raise OSError(f"there is no network route from here to {host}: {error}") from error


def address_of(interface: str) -> str:
    """Return the interface's IPv4 address, else its IPv6 one; raise OSError where it has none."""
    interfaces = psutil.net_if_addrs()
    for family in (socket.AF_INET, socket.AF_INET6):
        for address in interfaces.get(interface, ()):
            if address.family == family:
                return str(address.address).partition("%")[0]
    raise OSError(
        f"there is no network interface {interface!r} with an address here; this machine has "
        f"{', '.join(sorted(interfaces))}"
    )
