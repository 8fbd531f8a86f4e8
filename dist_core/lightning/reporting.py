"""What a trainer's validations tell the trial's search."""

from __future__ import annotations

from typing import Any

from dist_core.lightning.package import Callback
from dist_core.trial.current import get_core
from dist_core.trial.metrics import tell_metrics


class Reporting(Callback):
    """Tells the trial's search how each validation went. Raises what ends the trial, when it is pruned."""

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        if trainer.sanity_checking or not get_core().position.in_epoch_loop:
            return
        loop = trainer.fit_loop.epoch_loop
        names = {each.meta.name for each in loop.val_loop._results.values() if each.meta.on_epoch}
        numbers = {name: float(value) for name, value in trainer.callback_metrics.items() if name in names}
        step = trainer.current_epoch + 1 if loop.exhausted else trainer.global_step * loop.samples_of_step
        tell_metrics(numbers, step=step, chosen=_monitored(trainer, names))


def _monitored(trainer: Any, names: set[str]) -> str | None:
    """The one metric that the user's callbacks look at."""
    looked_at = {getattr(each, "monitor", None) for each in trainer.callbacks} & names
    return looked_at.pop() if len(looked_at) == 1 else None
