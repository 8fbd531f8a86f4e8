"""Choice of the trainer's metric that is the value of the trial."""

from __future__ import annotations

import logging
from collections.abc import Mapping

logger = logging.getLogger(__name__)

_TIMES = ("_runtime", "_per_second", "_preparation_time", "_mem_")


def without_times(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return what an evaluation found out about the model, without how long that took."""
    apart = ("epoch", "step", "total_flos", "_timestamp")
    return {
        name: value
        for name, value in metrics.items()
        if name not in apart and not any(part in name for part in _TIMES) and isinstance(value, (int, float))
    }


def objective_in(metrics: Mapping[str, float], chosen: str | None, *, minimises: bool) -> float | None:
    """Return the metric that the user chose, else the loss or what is no loss, as the search goes; None if unknown."""
    numbers = without_times(metrics)
    if chosen is not None:
        return numbers.get(chosen, numbers.get(f"eval_{chosen}"))
    losses = {name: value for name, value in numbers.items() if name.endswith("loss")}
    for name in ("eval_loss", "val_loss"):
        if minimises and name in losses:
            return losses[name]
    fitting = losses if minimises and losses else {name: numbers[name] for name in numbers.keys() - losses.keys()}
    return next(iter(fitting.values())) if len(fitting) == 1 else None


def warn_of_no_objective(metrics: Mapping[str, float]) -> None:
    logger.warning(
        "cannot tell which of %s is the objective of the search, so none is reported; set metric_for_best_model, or "
        "the monitor of a Lightning callback",
        sorted(without_times(metrics)),
    )
