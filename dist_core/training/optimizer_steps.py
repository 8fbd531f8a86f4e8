"""OptimizerSteps: what ``optimizer.step`` does in a trial, as the user calls it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from dist_core.device import Elapsed, Mark
from dist_core.errors import UNDIVIDED, InvalidTraining
from dist_core.generations.fuse import CONNECTIONS_ABORTED
from dist_core.gradients.checks import refuse_unreduced, refuse_what_is_missing
from dist_core.gradients.optimizers import keeps_its_closure
from dist_core.gradients.patched_calls import updating
from dist_core.torch_private import is_in_backward
from dist_core.training.batch_scale import BatchScale
from dist_core.trial.participants import Passes
from dist_core.trial.replica import Replica


class OptimizerSteps:
    """Optimizer steps of one model; several models may share an optimizer. Updates wait for a step on all replicas."""

    def __init__(
        self,
        core: Replica,
        optimizers: Sequence[torch.optim.Optimizer],
        passes: Passes,
        scale: BatchScale,
    ) -> None:
        self._core = core
        self._optimizers = optimizers
        self._passes = passes
        self._place = passes.place
        self._gradient_reduction = passes.over
        self._measurements = passes.measurements
        self._module = passes.measurements.module
        self._device = passes.measurements.device
        self._scale = scale
        self._checked = False
        self._rates: dict[int, tuple[int, list[Any]]] | None = {}
        """Rates of each optimizer at its latest step, and the trial's step of that; None once a change was told of."""
        self.reduction: Elapsed | None = None
        """Time from the last step's last bucket to the end of the reduction; None where nothing was reduced."""

    def step(
        self,
        sharing: Sequence[OptimizerSteps],
        optimizer: torch.optim.Optimizer,
        original: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Step in place of the optimizer; ``sharing`` are those of all models that it updates, this one first.

        A closure runs in every pass, because its gradients are part of the step; the update waits for all replicas.
        """
        closure, args, kwargs = _without_closure(args, kwargs)
        result = None
        if closure is not None:
            if keeps_its_closure(type(optimizer)):  # type: ignore[arg-type]  # classes have a hash
                raise InvalidTraining(
                    f"{type(optimizer).__name__} itself runs the closure that step() was given, perhaps more than "
                    "once, but elastune must run the closure, once in each pass of a step. Write the step out in "
                    "the training loop, if it can be split (SAM: two backward passes), or choose an optimizer that "
                    "takes one gradient per step"
                )
            with torch.enable_grad():
                result = closure()
        if self._place.has_several_passes and is_in_backward():
            raise InvalidTraining(
                f"{type(optimizer).__name__}.step() runs within backward(), in a hook of a gradient, but this step "
                "takes several passes, and only the last one applies updates: it would have that pass's gradient "
                f"alone. Train each batch {UNDIVIDED}"
            )
        if self._place.has_several_passes:
            self._compare_rates(optimizer)
        for each in sharing:
            each._check_once()
            each._passes.look_at_gradients()
            each._place.passed_step = True
        if self._is_applied(sharing):
            answer = self._update(sharing, optimizer, functools.partial(original, *args, **kwargs))
            result = answer if closure is None else result
        return result

    def _compare_rates(self, optimizer: torch.optim.Optimizer) -> None:
        """Warn, once, of a loop that sets another learning rate in each pass of one step."""
        if self._rates is None:
            return
        step = self._core.position.steps
        now = [group["lr"] for group in optimizer.param_groups if not isinstance(group["lr"], torch.Tensor)]
        of_step, before = self._rates.get(id(optimizer), (-1, now))
        self._rates[id(optimizer)] = step, now
        if of_step == step and before != now:
            self._rates = None
            self._core.warn(
                f"the training loop gave {type(optimizer).__name__} another learning rate ({before} and {now}) in two "
                "passes of one step: a step's batch may come in several passes, and the body runs in each. Set the "
                "rate by dist_core.progress_step(batch_size), or count batches where model.is_last_micro_batch is true"
            )

    def _check_once(self) -> None:
        if not self._checked:
            self._checked = True
            refuse_what_is_missing(self._module, self._optimizers, self._core.warn)

    def _is_applied(self, sharing: Sequence[OptimizerSteps]) -> bool:
        """Tell whether an update now would change the weights: the step is whole, and all replicas have come to it."""
        place, group = self._place, self._gradient_reduction.group
        if place.passes_alone:
            place.stepped = True
            # A joiner's last pass: the optimizer makes its state, into which the trial's is received.
            return place.is_dry and self._core.generation.dry_steps_left == 0
        if place.step is None:
            self._core.outside.refuse_to_train_alone()
            return True
        if not place.is_last_micro_batch:
            return False
        one_of_several = not self._gradient_reduction.is_alone and len(self._core.models) == 1
        if one_of_several and not self._core.shared_step.reduces and not self._has_gradients:
            # A batch that this replica leaves out, and others perhaps do not.
            self._core.shared_step.take_part()
            return False
        last, here = None if group.passive else group.last_bucket, self._device.mark()
        self.reduction = None if last is None else Elapsed(last, here)
        if not self._gradient_reduction.whole_replica_agrees(
            self._core.shared_step.succeeds() and self._sums_are_whole(here)
        ):
            return False
        for each in sharing:
            each._place.stepped = True
        return self._core.record.counts_update()

    @property
    def _has_gradients(self) -> bool:
        gradients = (parameter.grad for parameter in self._module.parameters())
        return any(gradient is not None and bool(gradient.any()) for gradient in gradients)

    def _sums_are_whole(self, here: Mark) -> bool:
        """NCCL gives out sums before they are made; one that a replica was lost in is no sum."""
        replicas = self._core.generation.group
        if replicas.sums_over_nccl:
            here.wait()
            if replicas.aborted.is_set():
                self._core.generation.mark_broken(CONNECTIONS_ABORTED)
        return self._core.broken is None

    def _update(
        self,
        sharing: Sequence[OptimizerSteps],
        optimizer: torch.optim.Optimizer,
        update: Callable[[], Any],
    ) -> Any:
        if self._place.is_dry:
            with updating():
                return update()
        for each in sharing:
            each._place.stepped = True
            each._refuse_unreduced()
        if self._place.step is None:
            for each in sharing:
                each._gradient_reduction.group.reduced = False
            with updating():
                return update()
        self._core.states.before_update()
        try:
            with self._scale.applied_to(optimizer), updating():
                return update()
        finally:
            if self._measurements.preconditioner is not None:
                self._measurements.preconditioner.stepped(optimizer)
            # Gradients that reach a model later in the step (through a GAN's other half) are not its own step's.
            for each in sharing:
                each._gradient_reduction.group.measuring = False
            if optimizer is self._optimizers[0]:
                self._gradient_reduction.note_update()

    def _refuse_unreduced(self) -> None:
        if not self._gradient_reduction.is_alone and not self._gradient_reduction.group.reduced:
            refuse_unreduced(self._module, f"{self._core.generation.group.world_size} replicas")
        elif self._passes.were_bypassed:
            refuse_unreduced(self._module, "passes of this step")


def _without_closure(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """Return the closure that ``optimizer.step`` was called with, and its other arguments."""
    if args and (args[0] is None or callable(args[0])):
        return args[0], args[1:], kwargs
    return kwargs.get("closure"), args, {name: value for name, value in kwargs.items() if name != "closure"}
