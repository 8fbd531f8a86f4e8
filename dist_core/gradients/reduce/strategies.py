"""Strategies that sum buckets of gradients over the replicas; ``contract`` says what a strategy is."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as torch_power_sgd

from dist_core.errors import InvalidTraining
from dist_core.generations.group_needs import GroupNeeds
from dist_core.generations.process_groups import ReplicaGroup
from dist_core.gradients.reduce.contract import Bucket, ReducedBucket, ReductionStrategy
from dist_core.gradients.reduce.ordered_worker import OrderedWorker


class PlainAllReduce(ReductionStrategy):
    """A ring or a tree as the backend prefers: on Gloo and on NCCL the fastest at few replicas."""

    name = "all_reduce"

    def enter(self, group: ReplicaGroup) -> None:
        self._groups: Sequence[ProcessGroup] = [group.data]

    def reduce(self, bucket: Bucket) -> ReducedBucket:
        group = self._groups[bucket.index % len(self._groups)]
        return group.allreduce([bucket.buffer]).get_future().then(lambda done: done.value()[0])


class RoundRobin(PlainAllReduce):
    """Buckets take turns over several process groups, so that several reductions are on the wire at once.

    On Gloo this hides latency between buckets of many megabytes (0.77x of one group's time at 100 MB, two replicas);
    small buckets gain nothing. torch had such a group of its own until 2.4.
    """

    name = "round_robin"

    def __init__(self, num_groups: int = 2) -> None:
        if num_groups < 1:
            raise InvalidTraining(f"num_groups of round_robin is {num_groups}; it must be at least 1")
        self.needs = GroupNeeds(extra=num_groups)

    def enter(self, group: ReplicaGroup) -> None:
        self._groups = group.extra[: self.needs.extra]


class HalfPrecision(ReductionStrategy):
    """Gradients as 16-bit numbers: half the bytes, sums rounded to 11 (fp16) or 8 (bf16) significant bits.

    torch's hooks of the same name divide by the world size, which our weights have done already, and refuse bf16 on
    Gloo.
    """

    exact = False

    def __init__(self, name: str, dtype: torch.dtype) -> None:
        self.name = name
        self._dtype = dtype

    def enter(self, group: ReplicaGroup) -> None:
        self._group = group.data

    def reduce(self, bucket: Bucket) -> ReducedBucket:
        buffer = bucket.buffer
        small = buffer.to(self._dtype)

        def widened(done: torch.futures.Future[list[torch.Tensor]]) -> torch.Tensor:
            return buffer.copy_(done.value()[0])

        return self._group.allreduce([small]).get_future().then(widened)


class Hierarchical(ReductionStrategy):
    """Sum within each node first, then between one replica of each node, then hand the sum out within the node.

    What crosses the network is one bucket a node instead of one a replica. Worth it where the links between nodes are
    much slower than those within; NCCL's trees do the same inside one all-reduce.
    """

    name = "hierarchical"
    needs = GroupNeeds(by_node=True)

    def enter(self, group: ReplicaGroup) -> None:
        self._group, self._within, self._between = group, group.within_node, group.between_nodes

    def reduce(self, bucket: Bucket) -> ReducedBucket:
        buffer = bucket.buffer
        worker: OrderedWorker = self._group.once("ordered", lambda: OrderedWorker("ordered"))
        return worker.submit(lambda: self._sum(buffer), on=buffer.device)

    def _sum(self, buffer: torch.Tensor) -> torch.Tensor:
        if self._within is not None:
            self._group.wait(self._within.reduce([buffer], dist.ReduceOptions()), self._within)
        if self._between is not None:
            self._group.wait(self._between.allreduce([buffer]), self._between)
        if self._within is not None:
            self._group.wait(self._within.broadcast([buffer], dist.BroadcastOptions()), self._within)
        return buffer


class Sharded(ReductionStrategy):
    """Balanced fusion buffers: each replica sums an equal slice of every bucket and hands it to the others.

    The bucket is cut into as many equal slices as there are replicas (never along parameters, which differ in size by
    orders of magnitude). Replica i receives slice i of everybody (reduce-scatter), then all gather the summed slices;
    this is how SageMaker's data-parallel library and parameter servers of the BytePS kind balance their load. Gloo's
    own reduce-scatter is slow, so on CPUs the slices are exchanged all-to-all and summed locally.
    """

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


class PowerSGD(ReductionStrategy):
    """PowerSGD (Vogels et al., NeurIPS'19) by torch's own hook: matrices travel as two thin factors, errors fed back.

    Its state (error feedback, factors) belongs to a generation: it starts anew after each rescale, on all replicas.
    """

    name = "power_sgd"
    exact = False
    comparable = False
    reads_layout = True
    needs = GroupNeeds(extra=1)

    def __init__(self, matrix_rank: int = 2, warm_up_steps: int = 20) -> None:
        """Compress to this rank, behind ``warm_up_steps`` uncompressed ones.

        torch needs at least 2 of these, one for each bucket layout.
        """
        if matrix_rank < 1 or warm_up_steps < 2:
            raise InvalidTraining(
                f"power_sgd was given matrix_rank={matrix_rank}, warm_up_steps={warm_up_steps}; matrix_rank must be "
                "at least 1 and warm_up_steps at least 2"
            )
        self._matrix_rank, self._warm_up_steps = matrix_rank, warm_up_steps

    def enter(self, group: ReplicaGroup) -> None:
        self._world_size = group.world_size
        self._state = torch_power_sgd.PowerSGDState(
            process_group=group.extra[0] if group.extra else group.data,
            matrix_approximation_rank=self._matrix_rank,
            start_powerSGD_iter=self._warm_up_steps,
        )

    def reduce(self, bucket: Bucket) -> ReducedBucket:
        layout = bucket.layout()
        # The hook averages over the replicas; our buffers are weighted to be summed.
        layout.set_buffer(bucket.buffer.mul_(self._world_size))
        return torch_power_sgd.powerSGD_hook(self._state, layout)
