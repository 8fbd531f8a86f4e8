"""Gradient reduction strategies by name. A strategy sums one bucket over the replicas and returns a future of it."""

from __future__ import annotations

from typing import Protocol

import torch
import torch.distributed as dist

from dist_core.all_reduce.plain import PlainAllReduce
from dist_core.errors import InvalidTraining


class ReductionStrategy(Protocol):
    name: str
    exact: bool
    """Whether the sum is the sum, up to rounding (compression is not)."""

    def reduce(self, group: dist.ProcessGroup, buffer: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
        """Sum ``buffer`` over ``group``, asynchronously and in place."""
        ...


_STRATEGIES: dict[str, type[PlainAllReduce]] = {"all_reduce": PlainAllReduce}


def reduction_strategy(name: str) -> ReductionStrategy:
    """The strategy of that name; raises InvalidTraining for one that does not exist."""
    if name not in _STRATEGIES:
        raise InvalidTraining(
            f"reduction strategy {name!r} is not known; choose one of {', '.join(sorted(_STRATEGIES))}"
        )
    return _STRATEGIES[name]()


__all__ = ["PlainAllReduce", "ReductionStrategy", "reduction_strategy"]
