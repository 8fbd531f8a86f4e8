"""All-reduces of whole buckets: one group, several groups by turns, and 16-bit numbers.

The plain one is a ring or a tree as the backend prefers: on Gloo and on NCCL the fastest at few replicas. Buckets that
take turns over several process groups have several reductions on the wire at once: on Gloo this hides latency between
buckets of many megabytes (0.77x of one group's time at 100 MB, two replicas); small buckets gain nothing. torch had
such a group of its own until 2.4.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.distributed import ProcessGroup

from dist_core.errors import InvalidTraining
from dist_core.generations.group_needs import GroupNeeds
from dist_core.generations.process_groups import ReplicaGroup
from dist_core.gradients.reduce.contract import Bucket, ReducedBucket, ReductionStrategy


class PlainAllReduce(ReductionStrategy):
    name = "all_reduce"

    def enter(self, group: ReplicaGroup) -> None:
        self._groups: Sequence[ProcessGroup] = [group.data]

    def reduce(self, bucket: Bucket) -> ReducedBucket:
        group = self._groups[bucket.index % len(self._groups)]
        return group.allreduce([bucket.buffer]).get_future().then(lambda done: done.value()[0])


class RoundRobin(PlainAllReduce):
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
