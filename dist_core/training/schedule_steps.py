"""ScheduleSteps: what ``lr_scheduler.step`` does in a trial, as the user calls it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dist_core.gradients.schedules import has_ended, takes_metric, takes_position
from dist_core.gradients.step_place import StepPlace
from dist_core.trial.core import TrainingCore


class ScheduleSteps:
    """Within a training loop schedules advance with progress, and not with raw steps.

    Outside, after an epoch say, and with arguments (a metric, an epoch number) a step is the scheduler's own.
    """

    def __init__(self, core: TrainingCore, place: StepPlace) -> None:
        self._core = core
        self._place = place

    def step(self, schedule: Any, original: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs in place of its ``step``."""
        core, record = self._core, self._core.record
        in_loop = core.position.in_training_loop
        if self._place.is_dry or (in_loop and (not self._place.is_last_micro_batch or core.broken is not None)):
            return None
        if in_loop and record.has_made_next_update:
            record.counts_update()
            return None
        if takes_metric(schedule):
            args = _with_metric(core.mean_over_replicas, args, kwargs)
            if in_loop and core.broken is not None:
                return None
        if in_loop:
            record.counts_update()
        if takes_metric(schedule):
            return original(*args, **kwargs)
        adaptation = core.adaptation
        batches_vary = adaptation is not None and adaptation.bounds.adaptive
        if args and in_loop and batches_vary and takes_position(schedule):
            # The loop's own count of batches says little when their size changes.
            return original(core.epoch_position)
        if args or kwargs or not in_loop or not batches_vary:
            return original(*args, **kwargs)
        for _ in range(core.steps.scheduler_steps_due()):
            # The last step of all goes beyond the end, by as much as it is worth.
            if not has_ended(schedule):
                original()
        return None


def _with_metric(agree: Callable[[float], float], args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """The arguments with the metric replaced by what all replicas agree on; changes ``kwargs`` if it is there."""
    if "metrics" in kwargs:
        kwargs["metrics"] = agree(float(kwargs["metrics"]))
        return args
    return (agree(float(args[0])), *args[1:]) if args else args
