"""Division of a machine into slots, and what confines a replica to its own: a pure plan.

With GPUs a slot is a GPU, an equal part of one, or several; else it is a core. Slots of one kind make a node: a machine
whose GPUs differ looks like several.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from trials.launch.gpus import Gpu


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    node: str
    kind: str = ""
    """Model of the GPU, and which part of one, or how many."""
    gpus: tuple[str, ...] = ()
    """UUIDs; empty for a slot of cores."""
    gpu_share: float = 1.0
    cores: tuple[int, ...] = ()
    """Cores that its replica is bound to; empty: all that there are."""
    threads: int = 1
    emulates: str = ""
    """Speed profile of the device that it stands for; empty for a real one."""

    def environ(self, threads: str | None) -> dict[str, str]:
        """Variables for its replica; ``threads`` is what the user has set for all, if anything."""
        variables = {
            "OMP_NUM_THREADS": threads or str(self.threads),
            "CUDA_VISIBLE_DEVICES": ",".join(self.gpus),
            "ELASTUNE_GPU_SHARE": str(self.gpu_share),
        }
        if self.emulates:
            variables["ELASTUNE_EMULATED"] = self.emulates
        if self.cores:
            variables["ELASTUNE_CORES"] = ",".join(map(str, self.cores))
        return variables


def divide(
    node: str,
    gpus: Sequence[Gpu],
    cores: Sequence[int],
    numa_nodes: Sequence[Sequence[int]] = (),
    *,
    slots: int | None = None,
    per_gpu: int = 1,
    gpus_each: int = 1,
) -> tuple[Slot, ...]:
    """Divide a machine into slots.

    ``cores``: those this process may use; ``numa_nodes``: the machine's, with their cores. ``slots``: so many in all,
    where it is given; with GPUs at most as many as they have room for. Replicas are bound to the cores of one NUMA
    node, where there are several: memory of another one is far for them. ``per_gpu`` slots share a GPU, or each has
    ``gpus_each``; GPUs that are left over belong to none.
    """
    if not gpus:
        count = slots or len(cores)
        usable = [tuple(core for core in each if core in set(cores)) for each in numa_nodes]
        usable = [each for each in usable if each]
        homes = usable if len(usable) > 1 else [()]
        # Neighbours in number share a node, so that a small trial stays within one.
        return tuple(Slot(node=node, cores=homes[index * len(homes) // count]) for index in range(count))
    names: dict[str, str] = {}
    divided = []
    threads = max(1, len(cores) * gpus_each // (len(gpus) * per_gpu))
    for together in _bundles(gpus, gpus_each):
        model = together[0].model
        kind = f"{model}/{per_gpu}" if per_gpu > 1 else f"{model} x{gpus_each}" if gpus_each > 1 else model
        name = names.setdefault(kind, node if not names else f"{node}-{len(names) + 1}")
        close = {core for gpu in together for core in gpu.near_cores}
        near = tuple(core for core in cores if core in close)
        bound = near if len(near) < len(cores) else ()
        uuids = tuple(gpu.uuid for gpu in together)
        slot = Slot(node=name, kind=kind, gpus=uuids, gpu_share=1.0 / per_gpu, cores=bound, threads=threads)
        divided += [slot] * per_gpu
    return tuple(divided[:slots])


def _bundles(gpus: Sequence[Gpu], size: int) -> list[Sequence[Gpu]]:
    """Return bundles of ``size`` GPUs of one model each, neighbours together."""
    alike: dict[str, list[Gpu]] = {}
    for gpu in gpus:
        alike.setdefault(gpu.model, []).append(gpu)
    order = {gpu.uuid: index for index, gpu in enumerate(gpus)}
    found = [each[at : at + size] for each in alike.values() for at in range(0, len(each) // size * size, size)]
    return sorted(found, key=lambda bundle: order[bundle[0].uuid])


def by_node(slots: Sequence[Slot]) -> Mapping[str, list[Slot]]:
    nodes: dict[str, list[Slot]] = {}
    for slot in slots:
        nodes.setdefault(slot.node, []).append(slot)
    return nodes


def usable_cores() -> tuple[int, ...]:
    if hasattr(os, "sched_getaffinity"):
        return tuple(sorted(os.sched_getaffinity(0)))
    return tuple(range(os.cpu_count() or 1))


def numa_nodes(folder: Path = Path("/sys/devices/system/node")) -> tuple[tuple[int, ...], ...]:
    """Return the cores of each NUMA node; none where the system does not say."""
    core_lists = []
    for path in sorted(folder.glob("node[0-9]*/cpulist"), key=lambda path: int(path.parent.name.removeprefix("node"))):
        ranges = [part.split("-") for part in path.read_text().strip().split(",") if part]
        core_lists.append(tuple(core for each in ranges for core in range(int(each[0]), int(each[-1]) + 1)))
    return tuple(core_lists)
