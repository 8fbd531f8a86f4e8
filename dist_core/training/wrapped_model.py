"""WrappedModel: what a trial, its loader and the user's optimizer know of one model, however its gradients are reduced.

The loader says where in a step the training loop stands; earlier micro-batches' gradients are kept out of sight and
measured (``StepPasses``), and the learning rate is scaled around the optimizer's step (``OptimizerSteps``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol, cast

import torch

from dist_core.device import Device, Elapsed
from dist_core.errors import InvalidTraining
from dist_core.goodput import GradientStatistics
from dist_core.gradients.learning_rate import ScalingRule
from dist_core.gradients.noise.estimator import NoiseScale
from dist_core.gradients.noise.measurements import Measurements
from dist_core.gradients.noise.norms import AdamPreconditioner, is_adam
from dist_core.gradients.optimizers import has_ended, schedules_unknown, takes_metric, takes_position
from dist_core.gradients.patched_calls import intercept_optimizer, intercept_scaler, intercept_scheduler, models_of
from dist_core.gradients.step_place import StepPlace
from dist_core.gradients.wrapped_state import WrappedSchedules
from dist_core.state.manifests import PARTS
from dist_core.state.states import FunctionState
from dist_core.training.batch_scale import BatchScale
from dist_core.training.optimizer_steps import OptimizerSteps
from dist_core.trial.participants import Passes
from dist_core.trial.replica import Replica


class ModelState(Protocol):
    """Checkpointed state of a wrapped model, its optimizers, schedules and scaler."""

    schedules: WrappedSchedules
    scaler: Any

    def adopt_scaler(self, scaler: Any) -> None: ...

    def replicated(self) -> Iterator[torch.Tensor]:
        """Weights, and the optimizers' state of them."""
        ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...

    def inherit(self, state: dict[str, Any]) -> None:
        """Load a parent trial's state; hyperparameters stay this trial's own."""
        ...


def measurements_of(
    core: Replica,
    module: torch.nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    device: Device,
    preconditioned: bool | None,
) -> Measurements:
    """Return what measures the noise.

    ``preconditioned``: as the optimizers see gradients, or None for Adam's family only.
    """
    precondition = all(map(is_adam, optimizers)) if preconditioned is None else preconditioned
    return Measurements(module, device, AdamPreconditioner(optimizers) if precondition else None, core.warn)


class WrappedModel:
    """Model with its optimizers, schedules and scaler, as a part of a trial.

    ``outer``: the module that the user calls; the one with the weights is that of the passes' measurements.
    """

    def __init__(
        self,
        core: Replica,
        outer: torch.nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        passes: Passes,
        state: ModelState,
        *,
        scaling_rule: str | ScalingRule | None,
        noise_every: int | None,
    ) -> None:
        if noise_every is not None and noise_every < 1:
            raise InvalidTraining(f"noise_every is {noise_every}; it must be at least 1 step, or None")
        self._core = core
        self._outer = outer
        self.optimizers = optimizers
        self.passes = passes
        self.step_place = place = passes.place
        self.over = passes.over
        self.over.begins = self._begin_reduction
        self.measurements = measurements = passes.measurements
        self.module = measurements.module
        self.device_of_gradients: Device = measurements.device
        self.noise_every = noise_every
        self.resyncs = False
        self._wrapped_state = state
        self._schedule_steps = ScheduleSteps(core, place)
        self._scale = BatchScale(core, place, measurements, optimizers, scaling_rule)
        self._steps = OptimizerSteps(core, optimizers, passes, self._scale)

    def take_part(self, name: str | None) -> None:
        """Take part in the trial from now on, under this name in its checkpoints."""
        core = self._core
        if core.models and core.models.group_needs.slots_per_share != self.over.needs.slots_per_share:
            raise InvalidTraining(
                "a pipeline was wrapped together with a model that is not a pipeline: the processes of a replica "
                "would get one batch for the pipeline and different batches for the other model. Make the other "
                "model a part of the pipeline"
            )
        self._is_primary = not core.models
        core.models.append(self)
        for optimizer in self.optimizers:
            intercept_optimizer(optimizer, self)
        for schedule in self.schedules:
            intercept_scheduler(schedule, self)
        if self._wrapped_state.scaler is not None:
            intercept_scaler(self._wrapped_state.scaler, self)
        self.over.use(core.generation.group)
        core.registry.register(
            name or core.registry.unique_name("model"), FunctionState(self._save, self._load, self._inherit)
        )

    # ------------------------------------------------------------------ where in a step the loop stands

    @property
    def training(self) -> bool:
        return self._outer.training

    @property
    def is_last_micro_batch(self) -> bool:
        return self.step_place.is_last_micro_batch

    @property
    def whole_step_is_there(self) -> bool:
        """Tell whether the gradients are a whole step's: after its last microbatch, with no replica lost in it."""
        return self.is_last_micro_batch and self._core.broken is None

    @property
    def makes_an_update(self) -> bool:
        """Tell whether the present step changes the weights, on all replicas."""
        return self.whole_step_is_there and not self._schedule_steps.is_left_out

    @property
    def evaluates(self) -> bool:
        """Tell whether a forward pass with gradients enabled belongs to an evaluation.

        It does in evaluation mode, outside of training loops or in an evaluation loop within one. ``eval()`` alone
        makes no evaluation of a training loop: batch norms may be frozen, or ``train()`` was forgotten.
        """
        outside = self.step_place.step is None or self._core.loops.evaluations > 0
        return not self.training and not self.step_place.is_dry and outside

    def _begin_reduction(self) -> None:
        self.passes.note_loss_scale()
        if self._is_primary and self.step_place.step is not None:
            self._core.round.launch(reduces=True)

    # ------------------------------------------------------------------ a step's end, and its round

    @property
    def reduction(self) -> Elapsed | None:
        """Return the time from the last step's last bucket to the end of its reduction.

        None where nothing was reduced.
        """
        return self._steps.reduction

    def norms_to_sum(self) -> tuple[float, float]:
        """Return this replica's part of the round that is being launched."""
        return self.measurements.to_sum(self._core.position.steps)

    def take_norms(self, first: float, second: float) -> None:
        """Take the sums over the replicas, the same on all of them."""
        may_overflow = self._wrapped_state.scaler is not None
        self.measurements.take((first, second), init_batch=self._scale.init_batch, may_overflow=may_overflow)

    @property
    def statistics(self) -> GradientStatistics | None:
        """Squared norm of this model's gradient and its variance at the initial batch size, once measured."""
        return self._scale.statistics

    # ------------------------------------------------------------------ the optimizer, as the user calls it

    def optimizer_step(self, optimizer: torch.optim.Optimizer, original: Any, *args: Any, **kwargs: Any) -> Any:
        """Step in place of ``optimizer.step``: only once a full step is there, with the scaled learning rate."""
        sharing = [model._steps for model in cast("list[WrappedModel]", models_of(optimizer))]
        return self._steps.step(sharing, optimizer, original, args, kwargs)

    def backward_begins(self, loss: torch.Tensor) -> None:
        self.passes.look_at_loss(loss)

    def other_batch_drawn(self) -> None:
        """Make steps of one pass where the body draws from another loader, as in semi-supervised training."""
        if self.step_place.step is None or not self.training:
            return
        self.step_place.has_other_samples = True
        self._core.pacing.train_in_turns(
            "the training loop draws batches from a DataLoader of its own in its body, but this step takes several "
            "passes, and the body runs in each of them: a step would have as many of those batches. Train each batch",
            is_divided=self.step_place.has_several_passes,
        )

    def gradients_cleared(self) -> None:
        """Take note that the script clears gradients, which makes its steps passes that are not divided."""
        if self.step_place.step is None or self.step_place.passed_step or not self.step_place.has_gradients:
            return
        self._core.pacing.train_in_turns(
            "the training loop clears gradients between a backward pass and the optimizer's step, as for an attack on "
            "its examples or a batch that is skipped, but this step takes several passes, whose gradients are summed "
            "out of its sight. Train each batch",
            is_divided=self.step_place.has_several_passes,
        )

    # ------------------------------------------------------------------ learning rates and schedules

    def rates(self) -> list[float]:
        """Return the learning rates as the user and the schedules have set them.

        Those that lie on a GPU are left out.
        """
        return self._scale.rates_as_set()

    @property
    def learning_rate_factor(self) -> float:
        """Return the factor on the user's learning rate in this step, for the first optimizer."""
        return self._scale.factor_of(self.optimizers[0])

    @property
    def gain(self) -> float:
        """Steps at the initial batch size that the present step is worth."""
        return self._scale.gain

    def scheduler_step(self, schedule: Any, original: Any, *args: Any, **kwargs: Any) -> Any:
        """Step in place of ``lr_scheduler.step``."""
        return self._schedule_steps.step(schedule, original, args, kwargs)

    @property
    def groups_by_hand(self) -> list[dict[str, Any]]:
        driven = [getattr(each, "optimizer", None) for each in self.schedules]
        others = [] if None in driven else [each for each in self.optimizers if all(each is not one for one in driven)]
        return [group for optimizer in others for group in optimizer.param_groups]

    @property
    def schedules(self) -> list[Any]:
        return self._wrapped_state.schedules.present

    def adopt_schedule(self) -> None:
        """Adopt a schedule that was made after the model was wrapped, as if it had been given."""
        for optimizer in self.optimizers:
            if models_of(optimizer)[0] is not self:
                continue
            unknown = schedules_unknown(optimizer, self.schedules)
            # The order of several would not be the same on all replicas.
            if len(unknown) == 1:
                intercept_scheduler(unknown[0], self)
                self._wrapped_state.schedules.adopt(unknown[0])

    def other_optimizer_steps(self, optimizer: torch.optim.Optimizer) -> None:
        self.passes.look_at_optimizer(optimizer)

    def adopt_scaler(self, scaler: Any) -> None:
        """Adopt a gradient scaler that was not given and has begun to work for one of the optimizers."""
        if self._wrapped_state.scaler is None:
            intercept_scaler(scaler, self)
            self._wrapped_state.adopt_scaler(scaler)

    # ------------------------------------------------------------------ state

    def replicated_tensors(self) -> Iterator[torch.Tensor]:
        """Yield the tensors that replicas have in common between steps: weights, and the optimizer's state."""
        yield from self._wrapped_state.replicated()

    def _save(self) -> dict[str, Any]:
        tuned, noise = self.over.state_dict(), self.measurements.noise.state_dict()
        return {**self._wrapped_state.state_dict(), "noise": noise, "tuned": tuned}

    def _inherit(self, state: dict[str, Any]) -> None:
        self._load(state, self._wrapped_state.inherit)

    def _load(self, state: dict[str, Any], load: Callable[[dict[str, Any]], None] | None = None) -> None:
        (load or self._wrapped_state.load_state_dict)(state)
        # What the processes of a replica have written together says this once for all of them.
        state = state.get(PARTS, (state,))[0]
        self.measurements.noise.load_state_dict(state["noise"])
        self.over.load_state_dict(state["tuned"])
        if self.measurements.preconditioner is not None:
            self.measurements.preconditioner.forget()


def as_list(given: Any) -> list[Any]:
    if given is None:
        return []
    return list(given) if isinstance(given, (list, tuple)) else [given]


def schedules_in(given: Any) -> list[Any]:
    return [each for each in as_list(given) if hasattr(each, "step")]


class ScheduleSteps:
    """Within a training loop schedules advance with progress, and not with raw steps.

    Outside, after an epoch say, and with arguments (a metric, an epoch number) a step is the scheduler's own.
    """

    def __init__(self, core: Replica, place: StepPlace) -> None:
        self._core = core
        self._place = place

    def step(self, schedule: Any, original: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Make a step in place of the schedule's own."""
        core, record = self._core, self._core.record
        in_loop = core.position.in_training_loop
        if self._place.is_dry or (in_loop and (not self._place.is_last_micro_batch or core.broken is not None)):
            return None
        if in_loop and self.is_left_out:
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
        counts_passes = self._place.has_several_passes and args and isinstance(args[0], float)
        if args and in_loop and (batches_vary or counts_passes) and takes_position(schedule):
            # The loop's own count of batches says little when their size changes, or a step has several of them.
            return original(core.epoch_position)
        if args or kwargs or not in_loop or not batches_vary:
            return original(*args, **kwargs)
        for _ in range(core.steps.scheduler_steps_due()):
            # The last step of all goes beyond the end, by as much as it is worth.
            if not has_ended(schedule):
                original()
        return None

    @property
    def is_left_out(self) -> bool:
        """Tell whether a replica leaves out the present batch; schedules then stand still on all of them."""
        steps = self._core.shared_step
        if len(self._core.models) != 1 or not (self._place.computed or self._place.passed_step):
            return False
        if not steps.reduces and self._core.generation.group.world_size > 1:
            steps.take_part()
        return steps.is_left_out


def _with_metric(agree: Callable[[float], float], args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """Return the arguments with the metric replaced by what all replicas agree on.

    Changes ``kwargs`` if it is there.
    """
    if "metrics" in kwargs:
        kwargs["metrics"] = agree(float(kwargs["metrics"]))
        return args
    return (agree(float(args[0])), *args[1:]) if args else args


class MeasuredModel:
    """The part of a wrapped model that code of a user's can ask, however it was wrapped."""

    part: WrappedModel

    @property
    def is_last_micro_batch(self) -> bool:
        self.part.step_place.is_asked_for = True
        return self.part.is_last_micro_batch

    @property
    def noise(self) -> NoiseScale:
        return self.part.measurements.noise

    @property
    def statistics(self) -> GradientStatistics | None:
        """Squared norm of this model's gradient and its variance at the initial batch size, once measured."""
        return self.part.statistics

    @property
    def gain(self) -> float:
        """Steps at the initial batch size that the present step is worth."""
        return self.part.gain
