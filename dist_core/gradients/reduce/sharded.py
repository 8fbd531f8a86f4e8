"""Balanced fusion buffers: each replica sums an equal slice of every bucket and hands it to the others.

The bucket is cut into as many equal slices as there are replicas (never along parameters, which differ in size by
orders of magnitude). Replica i receives slice i of everybody (reduce-scatter), then all gather the summed slices; this
is how SageMaker's data-parallel library and parameter servers of the BytePS kind balance their load. Gloo's own
reduce-scatter is slow, so on CPUs the slices are exchanged all-to-all and summed locally.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from dist_core.generations.group_needs import GroupNeeds
from dist_core.generations.process_groups import ReplicaGroup
from dist_core.gradients.reduce.contract import Bucket, ReducedBucket, ReductionStrategy
from dist_core.gradients.reduce.ordered_worker import OrderedWorker


class Sharded(ReductionStrategy):
    name = "sharded"
    needs = GroupNeeds(extra=1)

    def enter(self, group: ReplicaGroup) -> None:
        self._replicas = group
        self._group = group.extra[0] if group.extra else group.data
        self._world_size = group.world_size

    def reduce(self, bucket: Bucket) -> ReducedBucket:
        buffer = bucket.buffer
        worker: OrderedWorker = self._replicas.once("ordered", lambda: OrderedWorker("ordered"))
        return worker.submit(lambda: self._exchange(buffer), on=buffer.device)

    def _exchange(self, buffer: torch.Tensor) -> torch.Tensor:
        """Sum ``buffer`` over the replicas in place; blocks this thread, not the backward pass."""
        world_size = self._world_size
        slice_size = -(-buffer.numel() // world_size)
        padded = buffer
        if slice_size * world_size != buffer.numel():
            padded = torch.nn.functional.pad(buffer, (0, slice_size * world_size - buffer.numel()))
        if self._group.name() == "nccl":
            own_slice = torch.empty(slice_size, dtype=buffer.dtype, device=buffer.device)
            self._wait(self._group._reduce_scatter_base(own_slice, padded, dist.ReduceScatterOptions()))
        else:
            received = torch.empty_like(padded)
            self._wait(self._group.alltoall_base(received, padded, [], [], dist.AllToAllOptions()))
            own_slice = received.view(world_size, slice_size).sum(dim=0)
        slices = [torch.empty_like(own_slice) for _ in range(world_size)]
        self._wait(self._group.allgather([slices], [own_slice]))
        for index, part in enumerate(slices):
            target = buffer[index * slice_size : (index + 1) * slice_size]
            target.copy_(part[: target.numel()])
        return buffer

    def _wait(self, work: dist.Work) -> None:
        self._replicas.wait(work, self._group)
