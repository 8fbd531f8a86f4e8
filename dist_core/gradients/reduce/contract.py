"""Contract of a reduction strategy: it sums one bucket of gradients over the replicas, beside the backward pass.

Buckets arrive in the same order on every replica. A strategy that issues more than one collective a bucket does so on
groups of its own (``GroupNeeds``) from one thread of its own, because the order of collectives within a group must be
the same everywhere too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from dist_core.generations.group_needs import GroupNeeds
from dist_core.generations.process_groups import ReplicaGroup
from dist_core.torch_private import GradBucket

ReducedBucket = torch.futures.Future[torch.Tensor]


@dataclass(frozen=True, slots=True)
class Bucket:
    """A flat buffer of gradients, already multiplied by this replica's weight."""

    index: int
    buffer: torch.Tensor
    layout: Callable[[], GradBucket]
    """torch's description of the bucket (parameters, shapes), for compression that works on matrices."""


class ReductionStrategy:
    name: str
    exact = True
    """The sum is exact up to rounding in the gradients' own precision (compression is not)."""
    comparable = True
    """A few steps show its speed: not where compression begins after a warm-up."""
    reads_layout = False
    """``Bucket.layout`` is used; reading it costs a look at the reducer when buckets change."""
    needs = GroupNeeds()

    def enter(self, group: ReplicaGroup) -> None:
        """Reduce over this generation from now on, and let go of the one before. Called between steps, on all replicas.

        A replica that is alone reduces nothing, and its group may lack what the strategy needs.
        """
        raise NotImplementedError

    def reduce(self, bucket: Bucket) -> ReducedBucket:
        """Return the sum over the replicas; may be the buffer itself, changed in place. Errors come with the future."""
        raise NotImplementedError


def completed(buffer: torch.Tensor) -> ReducedBucket:
    future: ReducedBucket = torch.futures.Future()
    future.set_result(buffer)
    return future
