"""Lets calls of the user's optimizer, gradient scaler and learning rate scheduler pass through the wrapped model.

Of optimizers and schedulers only the objects change, not their classes: what else uses them is left alone. A gradient
scaler that nobody gave us is recognised when it works for an optimizer of ours, which only its class can tell.
"""

from __future__ import annotations

import copyreg
import functools
import sys
import types
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.optim.swa_utils import AveragedModel

from dist_core.errors import InvalidTraining
from dist_core.torch_private import LoaderIterator, forget_scaled_step


class Wrapper(Protocol):
    """A wrapped model, as the calls that pass through it see it."""

    module: torch.nn.Module

    @property
    def schedules(self) -> list[Any]: ...

    @property
    def is_last_micro_batch(self) -> bool: ...

    @property
    def whole_step_is_there(self) -> bool:
        """Tell whether the gradients are a whole step's: after its last microbatch, with no replica lost in it."""
        ...

    @property
    def makes_an_update(self) -> bool:
        """Tell whether the present step changes the weights, on all replicas."""
        ...

    def optimizer_step(self, optimizer: torch.optim.Optimizer, original: Any, *args: Any, **kwargs: Any) -> Any: ...

    def scheduler_step(self, schedule: Any, original: Any, *args: Any, **kwargs: Any) -> Any: ...

    def gradients_cleared(self) -> None:
        """Take note that the script clears gradients."""
        ...

    def backward_begins(self, loss: torch.Tensor) -> None:
        """Look at a loss, perhaps of this model, whose backward pass begins."""
        ...

    def other_optimizer_steps(self, optimizer: torch.optim.Optimizer) -> None:
        """Look at an optimizer that steps weights of no wrapped model."""
        ...

    def other_batch_drawn(self) -> None:
        """Take note that the script has drawn a batch from a loader of torch's, with gradients on."""
        ...

    def adopt_scaler(self, scaler: Any) -> None:
        """Adopt a gradient scaler that was not given and has begun to work for one of the optimizers."""
        ...


def models_of(optimizer: Any) -> list[Wrapper]:
    """Models wrapped with this optimizer, in order; the first one sees its steps. Empty for an unknown optimizer."""
    return getattr(optimizer, "_elastune_models", [])


def intercept_scaler(scaler: Any, model: Wrapper) -> None:
    """Keep a gradient scaler from gradients that are being accumulated."""
    scaler._elastune_model = model

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


def intercept_optimizer(optimizer: torch.optim.Optimizer, model: Wrapper) -> None:
    """Let the optimizer's steps pass through the model; ``step`` stays a bound method, as schedulers wrap it.

    Of several models with one optimizer the first sees calls.
    """
    _watch_what_nobody_gave()
    _wrapped[model.module] = weakref.ref(model)
    _harmless.clear()
    models = models_of(optimizer)
    models.append(model)
    if len(models) > 1:
        return
    optimizer._elastune_models = models  # type: ignore[attr-defined]  # ours
    step = optimizer.step

    def adaptive_step(_: Any, *args: Any, **kwargs: Any) -> Any:
        return model.optimizer_step(optimizer, step, *args, **kwargs)

    if hasattr(step, "_wrapped_by_lr_sched"):
        # A learning rate scheduler looks for its mark on the optimizer's step, and warns when it is missing.
        adaptive_step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]  # torch's own mark
    optimizer.step = types.MethodType(adaptive_step, optimizer)  # type: ignore[method-assign]  # this instance only
    zero_grad = optimizer.zero_grad

    def noticed_zero_grad(_: Any, *args: Any, **kwargs: Any) -> None:
        for each in models:
            each.gradients_cleared()
        zero_grad(*args, **kwargs)

    optimizer.zero_grad = types.MethodType(noticed_zero_grad, optimizer)  # type: ignore[method-assign]  # this instance only


def intercept_scheduler(scheduler: Any, model: Wrapper) -> None:
    """Let calls of this scheduler's ``step`` pass through the model.

    By a class of its own: a scheduler's state is its attributes, among which a method would end up in checkpoints.
    """
    before = type(scheduler)

    def adaptive_step(self: Any, *args: Any, **kwargs: Any) -> Any:
        return model.scheduler_step(self, types.MethodType(before.step, self), *args, **kwargs)

    def as_before(self: Any, protocol: Any) -> Any:
        """Reduce to the class that the script knows: a copy takes no part in the training."""
        state = self.__getstate__() if hasattr(self, "__getstate__") else self.__dict__
        return copyreg._reconstructor, (before, object, None), state  # type: ignore[attr-defined]  # not in the stubs

    methods = {"step": adaptive_step, "__reduce_ex__": as_before, "__doc__": before.__doc__}
    scheduler.__class__ = type(before.__name__, (before,), methods)


# ---------------------------------------------------------------------- objects that nobody gave us

_harmless: WeakSet[torch.optim.Optimizer] = WeakSet()
_wrapped: WeakKeyDictionary[torch.nn.Module, weakref.ref[Wrapper]] = WeakKeyDictionary()
_updating = 0


@functools.cache
def _watch_what_nobody_gave() -> None:
    register_optimizer_step_pre_hook(_look_at_unknown_optimizer)
    _watch_scalers()
    _watch_averages()
    _watch_losses()
    _watch_loaders()


def _wrappers() -> Iterator[Wrapper]:
    """Yield the wrapped models that are still there."""
    for known in list(_wrapped.values()):
        wrapper = known()
        if wrapper is not None:
            yield wrapper


def _look_at_unknown_optimizer(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    """Look at an optimizer that was not given. Within a known one's step it may step: some are built around others."""
    if _updating or models_of(optimizer):
        return
    if optimizer not in _harmless:
        _refuse_weights_of_others(optimizer)
        _harmless.add(optimizer)
    first = next(_wrappers(), None)
    if first is not None:
        first.other_optimizer_steps(optimizer)


def _refuse_weights_of_others(optimizer: torch.optim.Optimizer) -> None:
    """Refuse an optimizer that steps a wrapped model's weights: also on broken steps, and in no checkpoint."""
    wrapped = {id(each) for module in _wrapped for each in module.parameters()}
    mine = [each for group in optimizer.param_groups for each in group["params"] if id(each) in wrapped]
    if mine:
        raise InvalidTraining(
            f"{type(optimizer).__name__} steps {len(mine)} parameters of a model that was wrapped without it: no "
            "checkpoint would contain its state, and its learning rate would not follow the batch size. Give all "
            "optimizers of a model: AdaptiveDataParallel(model, [first, second])"
        )


@contextmanager
def updating() -> Iterator[None]:
    """Mark that a known optimizer makes its update."""
    global _updating
    _updating += 1
    try:
        yield
    finally:
        _updating -= 1


def _watch_scalers() -> None:
    """Have a scaler that was not given adopted by the model of the optimizer that it works for."""

    def watch(name: str) -> None:
        original: Callable[..., Any] = getattr(torch.amp.GradScaler, name)

        def watched(self: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            models = models_of(optimizer)
            if models and not hasattr(self, "_elastune_model"):
                models[0].adopt_scaler(self)
                if hasattr(self, "_elastune_model"):
                    return getattr(self, name)(optimizer, *args, **kwargs)
            return original(self, optimizer, *args, **kwargs)

        watched.__doc__, watched.__name__ = original.__doc__, name
        setattr(torch.amp.GradScaler, name, watched)

    for name in ("unscale_", "step"):
        watch(name)


def _watch_losses() -> None:
    original = torch.Tensor.backward

    @functools.wraps(original)
    def backward(self: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        for wrapper in _wrappers():
            wrapper.backward_begins(self)
        original(self, *args, **kwargs)  # type: ignore[no-untyped-call]  # not annotated in torch

    torch.Tensor.backward = backward  # type: ignore[method-assign]  # looks at losses of ours, and is torch's


def _watch_loaders() -> None:
    original = LoaderIterator.__next__

    @functools.wraps(original)
    def drawn(self: Any) -> Any:
        batch = original(self)
        # Evaluations have gradients off, and loaders of ours read through torch's.
        if torch.is_grad_enabled() and not sys._getframe(1).f_globals.get("__name__", "").startswith("dist_core."):
            for wrapper in _wrappers():
                wrapper.other_batch_drawn()
        return batch

    LoaderIterator.__next__ = drawn  # type: ignore[method-assign]  # tells of batches, and is torch's


def _watch_averages() -> None:
    """Move an average of a model's weights once a step: not in earlier passes, nor where the step is repeated."""
    original = AveragedModel.update_parameters

    def update_parameters(self: AveragedModel, model: torch.nn.Module) -> None:
        inner = getattr(model, "module", model)
        known = _wrapped.get(inner) if isinstance(inner, torch.nn.Module) else None
        wrapper = None if known is None else known()
        if wrapper is None or wrapper.makes_an_update:
            original(self, model)

    update_parameters.__doc__ = original.__doc__
    AveragedModel.update_parameters = update_parameters  # type: ignore[method-assign]  # torch's, for models of ours
