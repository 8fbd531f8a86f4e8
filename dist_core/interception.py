"""Lets calls of the user's optimizer, gradient scaler and learning rate scheduler pass through the wrapped model.

Only these objects change, not their classes: what else uses them is left alone.
"""

from __future__ import annotations

import types
from typing import TYPE_CHECKING, Any

import torch

from dist_core._torch_compat import forget_scaled_step

if TYPE_CHECKING:
    from dist_core.data_parallel import AdaptiveDataParallel


def intercept_scaler(scaler: Any, model: AdaptiveDataParallel) -> None:
    """A gradient scaler must not touch gradients that are being accumulated."""

    def intercept(name: str) -> None:
        original = getattr(scaler, name)

        def adaptive(*args: Any, **kwargs: Any) -> Any:
            if model.whole_step_is_there:
                return original(*args, **kwargs)
            if name == "update" and model.is_last_micro_batch:
                forget_scaled_step(scaler)
            return None

        setattr(scaler, name, adaptive)

    for name in ("unscale_", "step", "update"):
        intercept(name)


def intercept_optimizer(optimizer: torch.optim.Optimizer, model: AdaptiveDataParallel) -> None:
    """It stays a bound method, as schedulers wrap it. Of several models with one optimizer the first sees calls."""
    owner = getattr(optimizer, "_elastune_owner", None)
    if owner is not None:
        owner.partners.append(model)
        return
    optimizer._elastune_owner = model  # type: ignore[attr-defined]  # ours
    step = optimizer.step

    def adaptive_step(_: Any, *args: Any, **kwargs: Any) -> Any:
        return model.optimizer_step(step, *args, **kwargs)

    if hasattr(step, "_wrapped_by_lr_sched"):
        # A learning rate scheduler looks for its mark on the optimizer's step, and warns when it is missing.
        adaptive_step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]  # torch's own mark
    optimizer.step = types.MethodType(adaptive_step, optimizer)  # type: ignore[method-assign]  # this instance only


def intercept_scheduler(scheduler: Any, model: AdaptiveDataParallel) -> None:
    """Let calls of this scheduler's ``step`` pass through the model.

    By a class of its own: a scheduler's state is its attributes, among which a method would end up in checkpoints.
    """
    before = type(scheduler)

    def adaptive_step(self: Any, *args: Any, **kwargs: Any) -> Any:
        return model.scheduler_step(types.MethodType(before.step, self), *args, **kwargs)

    scheduler.__class__ = type(before.__name__, (before,), {"step": adaptive_step, "__doc__": before.__doc__})
