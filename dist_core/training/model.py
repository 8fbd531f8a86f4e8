"""AdaptiveDataParallel: torch's DistributedDataParallel whose group can change, and which watches the gradients.

What it is to its trial is a ``WrappedModel``; here are the passes through torch's own class, whose buckets a
``BucketReducer`` reduces.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch.nn.parallel import DistributedDataParallel

from dist_core.device import device_of, limit_memory
from dist_core.errors import InvalidTraining
from dist_core.gradients.checks import (
    refuse_what_cannot_be_trained,
    refuse_what_needs_the_host,
)
from dist_core.gradients.choice import ReductionChoice
from dist_core.gradients.frozen_weights import FrozenWeights
from dist_core.gradients.learning_rate import ScalingRule
from dist_core.gradients.reduce import ReductionStrategy, reduction_strategy
from dist_core.gradients.step_place import StepPlace
from dist_core.gradients.wrapped_state import WrappedState
from dist_core.link.environment import gpu_share
from dist_core.torch_private import leave_uncompiled, no_buffer_sync
from dist_core.training.batch_scale import write_scalars
from dist_core.training.reduction import BucketReduction
from dist_core.training.step_passes import StepPasses
from dist_core.training.wrapped_model import MeasuredModel, WrappedModel, as_list, measurements_of, schedules_in
from dist_core.trial.current import get_core

AUTO_CAPS_MB = (25.0, 4.0, 100.0)
"""Bucket sizes that ``bucket_cap_mb="auto"`` tries, torch's own first."""


class AdaptiveDataParallel(MeasuredModel, DistributedDataParallel):
    """Wrap a model and its optimizer for elastic data-parallel training.

    Args:
        model: The model, on the device that it trains on.
        optimizer: Its optimizer, or a list where it has several.
        lr_scheduler: One schedule or a list, checkpointed with the model; one that is stepped within the training loop
            advances with progress.
        mp_scaler: A GradScaler, checkpointed with the model.
        scaling_rule: How learning rates follow the batch size: a name, a ScalingRule, or None for the one that fits
            each optimizer (AdaScale for SGD, square root for Adam's family).
        name: Name of the model in checkpoints, where a trial has several.
        reduction: A strategy such as ``all_reduce``, or several of which the fastest is found by timing early steps.
        bucket_cap_mb: Size of the buckets in which gradients are summed; ``"auto"`` times several sizes.
        noise_every: Steps from one measurement of the gradient noise scale to the next. None measures often at first,
            then on every tenth step.
        preconditioned: Measure the noise scale of gradients as the optimizer sees them. None does so for Adam's family.
        frozen: ``"rebuild"`` leaves weights that need no gradient out of checkpoints and hand-overs; the code builds
            them on every replica.
        on_divergence: What happens where replicas turn out not to hold one model any more: ``"fail"`` ends the trial
            with the parameter's name, ``"resync"`` goes on from rank 0's weights.
        **options: Further options of torch's DistributedDataParallel.

    Raises:
        InvalidTraining: The model has no trainable parameters, or a name does not exist.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
        lr_scheduler: Any = None,
        mp_scaler: Any = None,
        scaling_rule: str | ScalingRule | None = None,
        name: str | None = None,
        *,
        reduction: str | ReductionStrategy | Sequence[str] = "all_reduce",
        bucket_cap_mb: float | Literal["auto"] | None = None,
        noise_every: int | None = None,
        preconditioned: bool | None = None,
        frozen: Literal["keep", "rebuild"] = "keep",
        on_divergence: Literal["fail", "resync"] = "fail",
        **options: Any,
    ) -> None:
        optimizers = as_list(optimizer)
        refuse_what_cannot_be_trained(model, optimizers, options)
        if frozen not in ("keep", "rebuild"):
            raise InvalidTraining(f"frozen is {frozen!r}; choose 'keep' or 'rebuild'")
        if on_divergence not in ("fail", "resync"):
            raise InvalidTraining(f"on_divergence is {on_divergence!r}; choose 'fail' or 'resync'")
        place = next(each.device for each in model.parameters() if each.requires_grad)
        limit_memory(place, gpu_share())
        core = get_core()
        names = [reduction] if isinstance(reduction, str) or not isinstance(reduction, Sequence) else list(reduction)
        strategies = [reduction_strategy(each) for each in names]
        refuse_what_needs_the_host(model, device_of(place), strategies)
        options.setdefault("gradient_as_bucket_view", True)
        options["bucket_cap_mb"] = None if bucket_cap_mb == "auto" else bucket_cap_mb
        # The model inside is compiled where somebody compiles the wrapper; what arranges its reductions is not.
        leave_uncompiled("dist_core")
        group = core.generation.group
        super().__init__(model, process_group=group.data, init_sync=False, **no_buffer_sync(), **options)
        self._core = core
        self._no_sync = False
        choice = ReductionChoice(strategies, AUTO_CAPS_MB if bucket_cap_mb == "auto" else (None,))
        device = device_of(place)
        step_place = StepPlace()
        rebuilt = FrozenWeights(model) if frozen == "rebuild" else None
        state = WrappedState(model, optimizers, schedules_in(lr_scheduler), mp_scaler, rebuilt)
        measured = measurements_of(core, model, optimizers, device, preconditioned)
        self._gradient_reduction = BucketReduction(core, self, device, choice, measured)
        self._passes = StepPasses(core, model, step_place, self._gradient_reduction, measured, state)
        self.part = WrappedModel(
            core,
            self,
            optimizers,
            self._passes,
            state,
            scaling_rule=scaling_rule,
            noise_every=noise_every,
        )
        self.part.resyncs = on_divergence == "resync"
        self.part.take_part(name)

    # ------------------------------------------------------------------ forward and backward

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        part = self.part
        if not torch.is_grad_enabled() or part.evaluates:
            # Evaluation involves no other replica, so replicas may evaluate different numbers of batches.
            return self.module(*inputs, **kwargs)
        if part.step_place.step is not None:
            self._core.steps.note_forward((inputs, kwargs))
            self._passes.looks.forward_begins((inputs, kwargs))
        elif not part.step_place.passes_alone and not self._core.passes_do_not_count:
            self._core.outside.begin_forward(() if self._no_sync else self.module.buffers())
        if self._reduces_nothing:
            output = self.module(*inputs, **kwargs)
        else:
            output = self._forward_through_reducer(inputs, kwargs)
        self._passes.watch(output)
        return output

    @property
    def _reduces_nothing(self) -> bool:
        """Tell whether passes go around DDP: one replica needs it only to have its buckets ready for joiners."""
        return (
            self._gradient_reduction.is_alone
            and not self.part.step_place.is_dry
            and self._core.buckets_settled
            and not self.device_ids
        )

    def _forward_through_reducer(self, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        synchronises = self.part.is_last_micro_batch and not self._no_sync
        if synchronises:
            self._gradient_reduction.follow_weights()
        self.require_backward_grad_sync = synchronises
        if synchronises:
            self._gradient_reduction.group.begin_backward()
        output = super().forward(*inputs, **kwargs)  # type: ignore[no-untyped-call]  # not annotated in torch
        if synchronises:
            self._gradient_reduction.read_layouts_if_needed(are_rebuilt=self._has_rebuilt_buckets)
        return output

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.part.gradients_cleared()
        super().zero_grad(set_to_none)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Sum gradients of passes within only locally, to be reduced with the next pass outside."""
        self._passes.accumulate_for_user()
        before, self._no_sync = self._no_sync, True
        try:
            yield
        finally:
            self._no_sync = before

    # ------------------------------------------------------------------ what it knows

    @property
    def learning_rate_factor(self) -> float:
        """Return the factor on the user's learning rate in this step, for the first optimizer."""
        return self.part.learning_rate_factor

    def to_tensorboard(self, writer: Any, global_step: int, tag_prefix: str = "") -> None:
        """Write the noise scale's parts, gain and learning rate factor as scalars under ``tag_prefix``."""
        values = {"Gain": self.gain, "Learning_Rate_Factor": self.learning_rate_factor}
        statistics = self.statistics
        if statistics is not None:
            values.update(Gradient_Norm_Sqr=statistics.sqr, Gradient_Variance=statistics.var)
        write_scalars(writer, global_step, tag_prefix, values)

    # ------------------------------------------------------------------ what torch's class has, and this one replaces

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Copy, average or save the model itself, under the names that it has here; a copy does not train."""
        return ModelCopy, (self.module,)

    def register_comm_hook(self, state: object, hook: Any) -> None:
        raise InvalidTraining(
            "AdaptiveDataParallel has no register_comm_hook(): a hook would bypass what makes the gradient of uneven "
            "and accumulated batches exact. Choose a reduction: AdaptiveDataParallel(..., reduction='power_sgd'), or "
            "write one (docs/elastic.md)"
        )

    def join(self, *_: Any, **__: Any) -> Any:
        raise InvalidTraining(
            "AdaptiveDataParallel has no join(): AdaptiveDataLoader gives each replica a part of every batch, so that "
            "none ends before the others. Leave it out"
        )


class ModelCopy(torch.nn.Module):
    """A copy of a wrapped model: ``module`` is the model inside."""

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()
        self.module = module
        # Parts of it may be in another mode: they keep it.
        self.training = module.training

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        return self.module(*inputs, **kwargs)
