"""AdaptiveDataParallel: torch's DistributedDataParallel whose group can change, and which watches the gradients.

The loader says where in a step the training loop stands; the model arranges its reductions accordingly
(``BucketReducer``), keeps earlier micro-batches' gradients out of sight and measures them (``StepPasses``), and scales
the learning rate around the optimizer's step (``OptimizerSteps``).
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal, cast

import torch
from torch.nn.parallel import DistributedDataParallel

from dist_core.device import Device, Elapsed, device_of, limit_memory
from dist_core.errors import InvalidTraining
from dist_core.generations.process_groups import GroupNeeds, ReplicaGroup
from dist_core.goodput import GradientStatistics
from dist_core.gradients.checks import refuse_what_cannot_be_trained, refuse_what_needs_the_host
from dist_core.gradients.choice import ReductionChoice
from dist_core.gradients.learning_rate import ScalingRule
from dist_core.gradients.noise.estimator import NoiseScale
from dist_core.gradients.noise.measurements import Measurements
from dist_core.gradients.noise.norms import AdamPreconditioner, is_adam
from dist_core.gradients.patched_calls import (
    intercept_optimizer,
    intercept_scaler,
    intercept_scheduler,
    models_of,
)
from dist_core.gradients.reduce import ReductionStrategy, reduction_strategy
from dist_core.gradients.scaled_rates import ScaledRates
from dist_core.gradients.schedules import schedules_unknown
from dist_core.gradients.served_weights import ServedWeights
from dist_core.gradients.step_place import StepPlace
from dist_core.gradients.wrapped_state import WrappedState
from dist_core.link.environment import gpu_share
from dist_core.state.states import FunctionState
from dist_core.tensorboard import write_scalars
from dist_core.torch_private import leave_uncompiled
from dist_core.training.batch_scale import BatchScale
from dist_core.training.optimizer_steps import OptimizerSteps
from dist_core.training.reduction import Reduction
from dist_core.training.schedule_steps import ScheduleSteps
from dist_core.training.step_passes import StepPasses
from dist_core.trial.current import get_core

logger = logging.getLogger(__name__)

AUTO_CAPS_MB = (25.0, 4.0, 100.0)
"""Bucket sizes that ``bucket_cap_mb="auto"`` tries, torch's own first."""


class AdaptiveDataParallel(DistributedDataParallel):
    """Wrap ``model`` and its ``optimizer`` for elastic training; a list of optimizers where it has several.

    ``scaling_rule`` is a name, a ScalingRule, or None for the one that fits each optimizer. ``lr_scheduler`` (one, or
    a list) and ``mp_scaler`` (a GradScaler) are checkpointed with the model when given; a scheduler that is stepped
    within the training loop then advances with progress. ``reduction`` names a strategy of ``all_reduce``, or several
    to time early on and keep the fastest; ``bucket_cap_mb="auto"`` does the same for the bucket size. ``noise_every``
    measures the gradient noise scale on every so many steps (None: often at first, then every tenth).
    ``preconditioned`` measures it as the optimizer sees gradients (None: for Adam's family). Other options are those
    of torch's class.

    Raises InvalidTraining for a model without trainable parameters and for names that do not exist.
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
        **options: Any,
    ) -> None:
        optimizers = _as_list(optimizer)
        refuse_what_cannot_be_trained(model, optimizers, options)
        place = next(each.device for each in model.parameters() if each.requires_grad)
        limit_memory(place, gpu_share())
        if noise_every is not None and noise_every < 1:
            raise InvalidTraining(f"noise_every is {noise_every}; it must be at least 1 step, or None")
        core = get_core()
        names = [reduction] if isinstance(reduction, str) or not isinstance(reduction, Sequence) else list(reduction)
        strategies = [reduction_strategy(each) for each in names]
        refuse_what_needs_the_host(model, device_of(place), strategies)
        options.setdefault("gradient_as_bucket_view", True)
        options["bucket_cap_mb"] = None if bucket_cap_mb == "auto" else bucket_cap_mb
        # The model inside is compiled where somebody compiles the wrapper; what arranges its reductions is not.
        leave_uncompiled("dist_core")
        group = core.generation.group
        super().__init__(model, process_group=group.data, init_sync=False, forward_sync_buffers=False, **options)
        self._core = core
        self._optimizers = optimizers
        self.device_of_gradients: Device = device_of(place)
        self.step_place = StepPlace()
        self.noise_every = noise_every
        choice = ReductionChoice(strategies, AUTO_CAPS_MB if bucket_cap_mb == "auto" else (None,))
        served = _served_by(choice, optimizers)
        precondition = all(map(is_adam, optimizers)) if preconditioned is None else preconditioned
        preconditioner = AdamPreconditioner(optimizers) if precondition else None
        self._choice, self._served = choice, served
        self._rates = ScaledRates(scaling_rule, optimizers, core.warn)
        self._measurements = Measurements(model, self.device_of_gradients, preconditioner, core.warn)
        schedules = [each for each in _as_list(lr_scheduler) if hasattr(each, "step")]
        self._wrapped_state = WrappedState(model, optimizers, schedules, mp_scaler)
        self._reduction = Reduction(
            core,
            self,
            self.device_of_gradients,
            choice,
            self._measurements,
            served,
            begins=self._begin_reduction,
        )
        self.passes = StepPasses(
            core,
            model,
            self.step_place,
            self._reduction,
            self._measurements,
            self._wrapped_state,
            serves=served is not None,
        )
        self._schedule_steps = ScheduleSteps(core, self.step_place)
        self._scale = BatchScale(core, self.step_place, self._measurements, self._rates)
        self._steps = OptimizerSteps(
            core,
            self.device_of_gradients,
            model,
            optimizers,
            self.step_place,
            self._reduction,
            self._measurements,
            choice,
            self._rates,
            self._scale,
            served,
        )
        self._no_sync = False
        self._is_primary = not core.models
        core.models.append(self)
        for each in optimizers:
            intercept_optimizer(each, self)
        for schedule in schedules:
            intercept_scheduler(schedule, self)
        if mp_scaler is not None:
            intercept_scaler(mp_scaler, self)
        self.use_group(group)
        core.registry.register(name or core.registry.unique_name("model"), FunctionState(self._save, self._load))

    # ------------------------------------------------------------------ where in a step the loop stands

    def end_training_loop(self) -> None:
        self.passes.leave()
        self._reduction.end_training_loop()

    @property
    def is_last_micro_batch(self) -> bool:
        return self.step_place.is_last_micro_batch

    @property
    def whole_step_is_there(self) -> bool:
        """Whether the gradients are those of a whole step: of its last micro-batch, with no replica lost in it."""
        return self.is_last_micro_batch and self._core.broken is None

    # ------------------------------------------------------------------ the group it reduces over

    @property
    def group_needs(self) -> GroupNeeds:
        return self._reduction.needs

    @property
    def staleness(self) -> int:
        """How many steps replicas may be apart."""
        return self._reduction.staleness

    def use_group(self, group: ReplicaGroup) -> None:
        """Reduce over another group from the next step on; all its replicas call this at the same step boundary.

        Raises InvalidTraining when the group lacks what this model's strategies need.
        """
        self._reduction.use(group)

    @property
    def tuning_proposal(self) -> int | None:
        """On rank 0, the candidate to keep once all have been timed; None before, and after it was announced."""
        return self._reduction.proposal

    def tune(self, announced: int | None) -> None:
        """At a step boundary, on all replicas: go to the next candidate, or to the one that rank 0 announced."""
        self._reduction.tune(announced)

    # ------------------------------------------------------------------ forward and backward

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled() or self._evaluates:
            # Evaluation involves no other replica, so replicas may evaluate different numbers of batches.
            return self.module(*inputs, **kwargs)
        if self.step_place.step is not None:
            self._core.steps.note_forward()
        if self._reduces_nothing:
            output = self.module(*inputs, **kwargs)
        else:
            output = self._forward_through_reducer(inputs, kwargs)
        self.passes.watch(output)
        return output

    @property
    def _evaluates(self) -> bool:
        """Whether this pass belongs to no step of the trial, although gradients are on.

        In evaluation mode: outside of training loops, and in an evaluation loop within one. Frozen batch norms and
        a forgotten ``train()`` make no evaluation of a training loop.
        """
        outside = self.step_place.step is None or self._core.loops.evaluations > 0
        return not self.training and not self.step_place.is_dry and outside

    @property
    def _reduces_nothing(self) -> bool:
        """One replica needs DDP's machinery only to have its buckets in order before others join."""
        return (
            self._reduction.is_alone
            and not self.step_place.is_dry
            and self._core.buckets_settled
            and not self.device_ids
        )

    def _forward_through_reducer(self, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        synchronises = self.is_last_micro_batch and not self._no_sync
        self.require_backward_grad_sync = synchronises
        if synchronises:
            self._reduction.group.begin_backward()
        output = super().forward(*inputs, **kwargs)  # type: ignore[no-untyped-call]  # not annotated in torch
        if synchronises:
            self._reduction.read_layouts_if_needed(are_rebuilt=self._has_rebuilt_buckets)
        return output

    def _begin_reduction(self) -> None:
        self.passes.note_loss_scale()
        if self._is_primary and self.step_place.step is not None:
            self._core.steps.launch_vote()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Gradients of passes within are only summed up locally, to be reduced with the next pass outside."""
        self.passes.accumulate_for_user()
        before, self._no_sync = self._no_sync, True
        try:
            yield
        finally:
            self._no_sync = before

    # ------------------------------------------------------------------ a step's end, and its round

    def norms_to_sum(self) -> tuple[float, float]:
        """What this replica adds to the round that is being launched."""
        return self._measurements.to_sum(self._core.position.steps)

    def take_norms(self, first: float, second: float) -> None:
        """The sums over the replicas, the same on all of them."""
        may_overflow = self._wrapped_state.scaler is not None
        self._measurements.take((first, second), init_batch=self._scale.init_batch, may_overflow=may_overflow)

    @property
    def noise(self) -> NoiseScale:
        return self._measurements.noise

    @property
    def statistics(self) -> GradientStatistics | None:
        """Squared norm of this model's gradient and its variance at the initial batch size, once measured."""
        return self._scale.statistics

    # ------------------------------------------------------------------ the optimizer, as the user calls it

    def optimizer_step(self, optimizer: torch.optim.Optimizer, original: Any, *args: Any, **kwargs: Any) -> Any:
        """Runs in place of ``optimizer.step``: only once a full step is there, with the scaled learning rate."""
        sharing = [model._steps for model in cast("list[AdaptiveDataParallel]", models_of(optimizer))]
        return self._steps.step(sharing, optimizer, original, args, kwargs)

    @property
    def reduction(self) -> Elapsed | None:
        """From the last step's last bucket to the end of its reduction; None where nothing was reduced."""
        return self._steps.reduction

    # ------------------------------------------------------------------ learning rates and schedules

    def rates(self) -> list[float]:
        """The learning rates as the user and the schedules have set them; those that lie on a GPU are left out."""
        return self._rates.as_set()

    @property
    def learning_rate_factor(self) -> float:
        """What the user's learning rate is multiplied with in this step; the first optimizer's."""
        return self._scale.factor_of(self._optimizers[0])

    @property
    def gain(self) -> float:
        """Steps at the initial batch size that the present step is worth."""
        return self._scale.gain

    def scheduler_step(self, schedule: Any, original: Any, *args: Any, **kwargs: Any) -> Any:
        """Runs in place of ``lr_scheduler.step``."""
        return self._schedule_steps.step(schedule, original, args, kwargs)

    @property
    def schedules(self) -> list[Any]:
        return self._wrapped_state.schedules

    def adopt_schedule(self) -> None:
        """A schedule that was made after the model was wrapped becomes its own, as if it had been given."""
        for optimizer in self._optimizers:
            if models_of(optimizer)[0] is not self:
                continue
            unknown = schedules_unknown(optimizer, self.schedules)
            # The order of several would not be the same on all replicas.
            if len(unknown) == 1:
                intercept_scheduler(unknown[0], self)
                self._wrapped_state.adopt_schedule(unknown[0])

    def adopt_scaler(self, scaler: Any) -> None:
        """A gradient scaler that was not given has begun to work for one of the optimizers: it is the trial's too."""
        if self._wrapped_state.scaler is None:
            intercept_scaler(scaler, self)
            self._wrapped_state.adopt_scaler(scaler)

    def to_tensorboard(self, writer: Any, global_step: int, tag_prefix: str = "") -> None:
        """Write the noise scale's parts, gain and learning rate factor as scalars under ``tag_prefix``."""
        values = {"Gain": self.gain, "Learning_Rate_Factor": self.learning_rate_factor}
        statistics = self.statistics
        if statistics is not None:
            values.update(Gradient_Norm_Sqr=statistics.sqr, Gradient_Variance=statistics.var)
        write_scalars(writer, global_step, tag_prefix, values)

    # ------------------------------------------------------------------ state

    def replicated_tensors(self) -> Iterator[torch.Tensor]:
        """What is the same on all replicas between two steps: weights, and the optimizer's state of them."""
        if self._served is None:
            yield from self.module.parameters()
            yield from self._wrapped_state.tensors_of_optimizers()

    def _save(self) -> dict[str, Any]:
        if self._served is not None:
            self._served.settle()
        tuned, noise = self._choice.state_dict(), self.noise.state_dict()
        return {**self._wrapped_state.state_dict(), "noise": noise, "tuned": tuned}

    def _load(self, state: dict[str, Any]) -> None:
        self._wrapped_state.load_state_dict(state)
        self.noise.load_state_dict(state["noise"])
        self._choice.load_state_dict(state["tuned"])
        if self._measurements.preconditioner is not None:
            self._measurements.preconditioner.forget()

    # ------------------------------------------------------------------ what torch's class has, and this one replaces

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


def _as_list(given: Any) -> list[Any]:
    if given is None:
        return []
    return list(given) if isinstance(given, (list, tuple)) else [given]


def _served_by(choice: ReductionChoice, optimizers: Sequence[torch.optim.Optimizer]) -> ServedWeights | None:
    if choice.server is None:
        return None
    if len(optimizers) > 1:
        raise InvalidTraining(
            f"parameter_server keeps one optimizer and was given {len(optimizers)}; choose another reduction"
        )
    return ServedWeights(choice.server, optimizers[0])
