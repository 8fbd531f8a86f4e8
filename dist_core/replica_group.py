"""The replicas of one generation as seen by one of them: rank, world size and the collectives between them.

Gradients travel over ``data`` (NCCL between GPUs, Gloo between CPUs), flags and scalars over ``control`` (always Gloo,
so that reading a flag never synchronises a GPU). On CPUs both are one group. All collectives are issued by the
training thread, in program order, which is the same on all ranks.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from dist_core._torch_compat import HashStore, PrefixStore, Store, build_gloo_group, build_nccl_group
from dist_core.errors import PeerLost


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaGroup:
    rank: int
    world_size: int
    num_nodes: int
    data: dist.ProcessGroup
    control: dist.ProcessGroup

    def sum_later(self, vector: torch.Tensor) -> dist.Work | None:
        """Start summing a small CPU vector in place over the replicas; None when there is nobody to sum with."""
        if self.world_size == 1:
            return None
        return self.control.allreduce([vector])

    def broadcast_tensors(self, tensors: list[torch.Tensor], *, source: int = 0) -> None:
        """Send ``source``'s tensors into everybody's, all in flight at once. Raises PeerLost."""
        options = dist.BroadcastOptions()
        options.rootRank = source
        options.rootTensor = 0
        try:
            works = [self.control.broadcast([tensor], options) for tensor in tensors if tensor.numel()]
            for work in works:
                work.wait()
        except RuntimeError as error:
            raise PeerLost(f"a replica vanished while state was handed over: {error}") from error

    def broadcast_json(self, value: Any, *, source: int = 0) -> Any:
        """One JSON value from ``source`` to everybody."""
        return json.loads(
            self.broadcast_bytes(json.dumps(value).encode() if self.rank == source else b"", source=source)
        )

    def broadcast_bytes(self, content: bytes, *, source: int = 0) -> bytes:
        if self.world_size == 1:
            return content
        length = torch.tensor([len(content)], dtype=torch.int64)
        self.broadcast_tensors([length], source=source)
        payload = torch.empty(int(length), dtype=torch.uint8)
        if self.rank == source:
            payload.copy_(torch.frombuffer(bytearray(content), dtype=torch.uint8))
        self.broadcast_tensors([payload], source=source)
        return payload.numpy().tobytes()

    def gather_json(self, value: Any) -> list[Any]:
        """Everybody's JSON value, in rank order."""
        return [self.broadcast_json(value, source=rank) for rank in range(self.world_size)]


def build_group(
    store: Store,
    *,
    name: str,
    rank: int,
    world_size: int,
    num_nodes: int,
    timeout: timedelta,
    host: str = "127.0.0.1",
) -> ReplicaGroup:
    """Connect the members of a generation; blocks until all have come or ``timeout`` passed."""
    control = build_gloo_group(
        PrefixStore(f"{name}/control", store),
        rank=rank,
        world_size=world_size,
        timeout=timeout,
        name=f"{name}-control",
        host=host,
    )
    data = control
    if torch.cuda.is_available() and dist.is_nccl_available():
        data = build_nccl_group(
            PrefixStore(f"{name}/data", store),
            rank=rank,
            world_size=world_size,
            timeout=timeout,
            name=f"{name}-data",
        )
    return ReplicaGroup(rank=rank, world_size=world_size, num_nodes=num_nodes, data=data, control=control)


def lone_group() -> ReplicaGroup:
    """A group of one: a standalone process, or a joiner that has not joined yet."""
    return build_group(HashStore(), name="lone", rank=0, world_size=1, num_nodes=1, timeout=timedelta(seconds=30))
