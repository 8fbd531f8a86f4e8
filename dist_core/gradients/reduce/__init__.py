"""Gradient reduction strategies by name; ``contract`` says what a strategy is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from dist_core.errors import InvalidTraining
from dist_core.gradients.reduce.contract import Bucket, ReducedBucket, ReductionStrategy, completed
from dist_core.gradients.reduce.strategies import (
    HalfPrecision,
    Hierarchical,
    PlainAllReduce,
    PowerSGD,
    RoundRobin,
    Sharded,
)

STRATEGIES: dict[str, Callable[..., ReductionStrategy]] = {
    "all_reduce": PlainAllReduce,
    "bf16": lambda: HalfPrecision("bf16", torch.bfloat16),
    "fp16": lambda: HalfPrecision("fp16", torch.float16),
    "hierarchical": Hierarchical,
    "power_sgd": PowerSGD,
    "round_robin": RoundRobin,
    "sharded": Sharded,
}


def reduction_strategy(name: str | ReductionStrategy, **options: Any) -> ReductionStrategy:
    """Return the strategy of that name.

    Raise InvalidTraining for one that does not exist or options it does not have.
    """
    if not isinstance(name, str):
        return name
    if name not in STRATEGIES:
        raise InvalidTraining(f"reduction {name!r} is not known; choose one of {', '.join(sorted(STRATEGIES))}")
    try:
        return STRATEGIES[name](**options)
    except TypeError as error:
        raise InvalidTraining(f"reduction {name!r} was given options it does not have: {error}") from error


__all__ = [
    "STRATEGIES",
    "Bucket",
    "ReducedBucket",
    "ReductionStrategy",
    "completed",
    "reduction_strategy",
]
