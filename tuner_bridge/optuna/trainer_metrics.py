"""A trainer's evaluations, reported to the study of its trial; a trial that is to be pruned ends there."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import optuna
from optuna.study import StudyDirection

from tuner_bridge.in_replica.evaluations import objective_in, warn_of_no_objective, without_times


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
        assert self._directions is not None
        value = objective_in(metrics, chosen, minimises=self._directions[0] == StudyDirection.MINIMIZE)
        if value is None and chosen is None and not self._has_warned:
            self._has_warned = True
            warn_of_no_objective(metrics)
        return value
