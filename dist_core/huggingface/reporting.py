"""What a trainer's evaluations tell the trial's search."""

from __future__ import annotations

from typing import Any

from transformers import TrainerCallback

from dist_core.trial.current import get_core
from dist_core.trial.metrics import tell_metrics


class Reporting(TrainerCallback):
    """Tells the trial's search how each evaluation went. Raises what ends the trial, when it is pruned."""

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any = None, **_: Any) -> None:
        numbers = {name: float(value) for name, value in (metrics or {}).items() if isinstance(value, (int, float))}
        by_epochs = str(getattr(args.eval_strategy, "value", args.eval_strategy)) == "epoch"
        step = round(state.epoch) if by_epochs else state.global_step * (state.train_batch_size or 1)
        if get_core().position.in_epoch_loop:
            tell_metrics(numbers, step=step, chosen=args.metric_for_best_model)
