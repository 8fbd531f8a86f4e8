"""Sum within each node first, then between one replica of each node, then hand the sum out within the node.

What crosses the network is one bucket a node instead of one a replica. Worth it where the links between nodes are much
slower than those within; NCCL's trees do the same inside one all-reduce.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from dist_core.generations.group_needs import GroupNeeds
from dist_core.generations.process_groups import ReplicaGroup
from dist_core.gradients.reduce.contract import Bucket, ReducedBucket, ReductionStrategy
from dist_core.gradients.reduce.ordered_worker import OrderedWorker


class Hierarchical(ReductionStrategy):
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
