"""TrainerSearch: a trial trains a trainer of Hugging Face's with the hyperparameters that the study suggests.

The study hears of each evaluation, so any pruner works, and so does the scheduler.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import optuna
from optuna.study import StudyDirection

from dist_core.hooks import listen_to_metrics
from tuner_bridge.errors import InvalidSweep
from tuner_bridge.in_replica.evaluations import objective_in, warn_of_no_objective, without_times


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerSearch:
    """Objective of a search over trainers."""

    trainer: Callable[..., Any]
    space: Callable[..., Any]
    objective: Callable[..., Any] | None

    def __call__(self, trial: Any) -> Any:
        """Train with the trial's hyperparameters; the value, or values, of the last evaluation."""
        compute = self.objective or _sum_or_loss
        trainer = _checked(self.trainer())
        _set_arguments(trainer, self.space(trial))
        listen_to_metrics(TrainerMetrics(trial, compute))
        trainer.train(trial=trial)
        last = next((entry for entry in reversed(trainer.state.log_history) if "eval_loss" in entry), None)
        if last is None or last["step"] != trainer.state.global_step:
            last = trainer.evaluate()
        return _value(compute, last)


def _checked(trainer: Any) -> Any:
    if not getattr(trainer, "is_elastic", False):
        raise InvalidSweep(
            f"trainer_factory gave a {type(trainer).__name__}, which trains on one slot only; make it with "
            "`from dist_core.huggingface import ElasticTrainer as Trainer`, or elastic(SFTTrainer)"
        )
    return trainer


def _set_arguments(trainer: Any, values: Mapping[str, Any]) -> None:
    """Set arguments as ``Trainer.hyperparameter_search`` does; raise InvalidSweep for unknown names."""
    for name, value in values.items():
        if not hasattr(trainer.args, name):
            raise InvalidSweep(
                f"hp_space gave {name!r}, which is not an argument of {type(trainer.args).__name__}; use an argument "
                "of the model in model_init, which is called with the trial"
            )
        before = getattr(trainer.args, name)
        setattr(trainer.args, name, value if before is None or isinstance(value, bool) else type(before)(value))
    trainer._train_batch_size = trainer.args.train_batch_size


def _sum_or_loss(metrics: Mapping[str, float]) -> float:
    others = without_times(metrics)
    loss = others.pop("eval_loss", None)
    return sum(others.values()) if others or loss is None else loss


def _value(compute: Callable[..., Any], metrics: Mapping[str, float]) -> Any:
    found = compute(dict(metrics))
    return [float(each) for each in found] if isinstance(found, (list, tuple)) else float(found)


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
