"""torchmetrics of a module, in passes that do not count and in evaluations that every replica makes of all samples."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def metrics_of_all_samples(module: Any) -> Callable[[], None]:
    """Have the module's metrics ask no other replica, which has seen the same; returns what undoes it."""
    from torchmetrics import Metric

    before = [(each, each.distributed_available_fn) for each in module.modules() if isinstance(each, Metric)]
    for metric, _ in before:
        metric.distributed_available_fn = lambda: False

    def undo() -> None:
        for metric, available in before:
            metric.distributed_available_fn = available

    return undo


def reset_metrics(module: Any) -> None:
    from torchmetrics import Metric

    for each in module.modules():
        if isinstance(each, Metric):
            each.reset()
