"""A trainer's evaluations, reported to the study of its trial; a trial that is to be pruned ends there."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

import optuna
from optuna.study import StudyDirection

logger = logging.getLogger(__name__)

_TIMES = ("_runtime", "_per_second", "_preparation_time", "_mem_")


def without_times(metrics: Mapping[str, float]) -> dict[str, float]:
    """What an evaluation found out about the model, and not how long that took."""
    apart = ("epoch", "step", "total_flos", "_timestamp")
    return {
        name: value
        for name, value in metrics.items()
        if name not in apart and not any(part in name for part in _TIMES) and isinstance(value, (int, float))
    }


class TrainerMetrics:
    """Is told each evaluation's metrics. ``compute``: the objective's value from them; None: it is found by name."""

    def __init__(self, trial: Any, compute: Callable[[Mapping[str, float]], Any] | None = None) -> None:
        self._trial = trial
        self._compute = compute
        self._directions: list[StudyDirection] | None = None
        self._has_reported = self._has_warned = False

    def __call__(self, metrics: Mapping[str, float], step: int, chosen: str | None) -> None:
        trial = self._trial
        if self._directions is None:
            self._directions = list(trial.study.directions)
        if len(self._directions) > 1:
            trial.report_metrics(without_times(metrics), step)
            return
        if not self._has_reported and getattr(trial, "has_reported", False):
            # The user's code reports for itself.
            return
        value = self._value(metrics, chosen)
        if value is None:
            return
        self._has_reported = True
        trial.report(float(value), step)
        if trial.should_prune():
            raise optuna.TrialPruned(f"pruned at step {step}, where it had {value:.6g}")

    def _value(self, metrics: Mapping[str, float], chosen: str | None) -> Any:
        if self._compute is not None:
            return self._compute(dict(metrics))
        known = without_times(metrics)
        if chosen is not None:
            return known.get(chosen, known.get(f"eval_{chosen}"))
        assert self._directions is not None
        losses = {name: value for name, value in known.items() if name.endswith("loss")}
        minimises = self._directions[0] == StudyDirection.MINIMIZE
        for name in ("eval_loss", "val_loss"):
            if minimises and name in losses:
                return losses[name]
        fitting = losses if minimises and losses else {name: known[name] for name in known.keys() - losses.keys()}
        if len(fitting) == 1:
            return next(iter(fitting.values()))
        if not self._has_warned:
            self._has_warned = True
            logger.warning(
                "which of %s is the study's objective is not known, so none is reported; set "
                "metric_for_best_model, or the monitor of a Lightning callback",
                sorted(fitting) or sorted(known),
            )
        return None
