"""Balanced fusion buffers: each replica sums an equal slice of every bucket and hands it to the others.

The bucket is cut into as many equal slices as there are replicas (never along parameters, which differ in size by
orders of magnitude). Replica i receives slice i of everybody (reduce-scatter), then all gather the summed slices; this
is how SageMaker's data-parallel library and parameter servers of the BytePS kind balance their load. Gloo's own
reduce-scatter is slow, so on CPUs the slices are exchanged all-to-all and summed locally.

With ``staging="host"`` the exchange happens in pinned host memory, over a CPU group: the GPU's processors and its
links stay free for the backward pass. Worth it where cores idle and GPUs have no fast link of their own.
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.distributed as dist

from dist_core.errors import InvalidTraining
from dist_core.generations.process_groups import GroupNeeds, ReplicaGroup
from dist_core.gradients.reduce.contract import Bucket, ReducedBucket
from dist_core.gradients.reduce.ordered_worker import OrderedWorker


class Sharded:
    name = "sharded"
    exact = True
    comparable = True
    reads_layout = False

    def __init__(self, staging: Literal["device", "host"] = "device") -> None:
        if staging not in ("device", "host"):
            raise InvalidTraining(f"staging of sharded is {staging!r}; choose 'device' or 'host'")
        self._staging = staging
        self.needs = GroupNeeds(extra=1, extra_on_host=staging == "host")
        self._worker = OrderedWorker("sharded")

    def enter(self, group: ReplicaGroup) -> None:
        own = group.extra_on_host if self._staging == "host" else group.extra
        self._replicas = group
        self._group = own[0] if own else group.data
        self._rank, self._world_size = group.rank, group.world_size
        # Host memory is kept from bucket to bucket: pinning it anew costs more than the copy.
        self._staged: dict[int, torch.Tensor] = {}

    def reduce(self, bucket: Bucket) -> ReducedBucket:
        buffer = bucket.buffer
        if self._staging == "device":
            return self._worker.submit(lambda: self._exchange(buffer), device=buffer.device)
        host = self._staged.get(bucket.index)
        if host is None or host.numel() != buffer.numel() or host.dtype != buffer.dtype:
            host = torch.empty(buffer.numel(), dtype=buffer.dtype, pin_memory=buffer.is_cuda)
            self._staged[bucket.index] = host
        if not buffer.is_cuda:
            host.copy_(buffer)
            return self._worker.submit(lambda: buffer.copy_(self._exchange(host)), device=buffer.device)
        return self._through_pinned_memory(buffer, host)

    def _through_pinned_memory(self, buffer: torch.Tensor, host: torch.Tensor) -> ReducedBucket:
        stream = torch.cuda.Stream(buffer.device)  # type: ignore[no-untyped-call]  # not annotated in torch
        stream.wait_stream(torch.cuda.current_stream(buffer.device))
        with torch.cuda.stream(stream):
            host.copy_(buffer, non_blocking=True)
        there = stream.record_event()

        def exchange() -> torch.Tensor:
            there.synchronize()
            self._exchange(host)
            with torch.cuda.stream(stream):
                buffer.copy_(host, non_blocking=True)
            torch.cuda.current_stream(buffer.device).wait_stream(stream)
            return buffer

        return self._worker.submit(exchange, device=buffer.device)

    def _exchange(self, buffer: torch.Tensor) -> torch.Tensor:
        """Sum ``buffer`` over the replicas in place; blocks this thread, not the backward pass."""
        world_size = self._world_size
        slice_size = -(-buffer.numel() // world_size)
        padded = buffer
        if slice_size * world_size != buffer.numel():
            padded = torch.nn.functional.pad(buffer, (0, slice_size * world_size - buffer.numel()))
        if buffer.is_cuda:
            mine = torch.empty(slice_size, dtype=buffer.dtype, device=buffer.device)
            self._wait(self._group._reduce_scatter_base(mine, padded, dist.ReduceScatterOptions()))
        else:
            received = torch.empty_like(padded)
            self._wait(self._group.alltoall_base(received, padded, [], [], dist.AllToAllOptions()))
            mine = received.view(world_size, slice_size).sum(dim=0)
        slices = [torch.empty_like(mine) for _ in range(world_size)]
        self._wait(self._group.allgather([slices], [mine]))
        for index, part in enumerate(slices):
            target = buffer[index * slice_size : (index + 1) * slice_size]
            target.copy_(part[: target.numel()])
        return buffer

    def _wait(self, work: dist.Work) -> None:
        self._replicas.wait(work, self._group)
