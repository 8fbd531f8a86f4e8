"""GroupNeeds: what wrapped models want of the groups of a generation, and what a replica of theirs consists of."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from dist_core.device import Device
from dist_core.link.environment import gpu_share

Carrier = Literal["host", "staged", "nccl"]
"""Way that gradients travel: by Gloo from host memory, by Gloo through copies there, or by NCCL."""


def carrier_for(device: Device) -> Carrier:
    if device.is_host:
        return "host"
    # NCCL takes one rank for each GPU; replicas that share one go through the host.
    return "nccl" if device.has_nccl and gpu_share() == 1.0 else "staged"


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupNeeds:
    """Process groups that wrapped models want, and their reduction strategies beside ``data`` and ``control``."""

    carriers: frozenset[Carrier] = frozenset()
    """Carriers of the models' gradients."""
    extra: int = 0
    """Over all replicas, on the gradients' backend."""
    by_node: bool = False
    """One within each node, and one between the first replicas of the nodes."""
    members: int = 1
    """Processes that a replica consists of, each with a part of the model; those with the same part have a group."""
    of_parts: frozenset[Carrier] = frozenset()
    """Carriers of the gradients of model parts."""
    slots_per_share: int = 1
    """Processes that compute one share of a batch together."""

    def __or__(self, other: GroupNeeds) -> GroupNeeds:
        return GroupNeeds(
            carriers=self.carriers | other.carriers,
            extra=max(self.extra, other.extra),
            by_node=self.by_node or other.by_node,
            members=max(self.members, other.members),
            of_parts=self.of_parts | other.of_parts,
            slots_per_share=max(self.slots_per_share, other.slots_per_share),
        )

    @property
    def nccl(self) -> bool:
        """Tell whether all gradients lie where NCCL takes them from."""
        return self.carriers == {"nccl"}

    @property
    def apart(self) -> bool:
        """Tell whether some gradients lie outside host memory, and are sent by other threads than votes."""
        return bool(self.carriers - {"host"})
