"""``adaptdl.collective``: values that the replicas of a job tell each other, as JSON."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import Any

from dist_core.adaptdl.env import core_of_job


def initialize(master_addr: str | None = None, master_port: int | None = None, *_: Any) -> None:
    """Find the other replicas, unless a scheduler brings them together, at the first training step."""
    core = core_of_job()
    if core.environment is None and not core.joined:
        core.arrival.come_in()


def teardown() -> None:
    """Do nothing: replicas part when they end."""


def broadcast(value: Any) -> Any:
    """Rank 0's value, on every replica."""
    return core_of_job().together(lambda group: group.broadcast_json(value), otherwise=lambda: value)


def allreduce(value: Any, reduce_fn: Callable[[Any, Any], Any] = operator.add) -> Any:
    """Return all replicas' values, combined in the order of their ranks."""
    values: list[Any] = core_of_job().together(lambda group: group.gather_json(value), otherwise=lambda: [value])
    return functools.reduce(reduce_fn, values)
