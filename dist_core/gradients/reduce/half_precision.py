"""Gradients travel as 16-bit numbers: half the bytes, sums rounded to 11 (fp16) or 8 (bf16) significant bits.

torch's hooks of the same name divide by the world size, which our weights have done already, and refuse bf16 on Gloo.
"""

from __future__ import annotations

import torch

from dist_core.generations.process_groups import ReplicaGroup
from dist_core.gradients.reduce.contract import Bucket, ReducedBucket, ReductionStrategy


class HalfPrecision(ReductionStrategy):
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


def fp16() -> HalfPrecision:
    return HalfPrecision("fp16", torch.float16)


def bf16() -> HalfPrecision:
    return HalfPrecision("bf16", torch.bfloat16)
