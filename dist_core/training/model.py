"""AdaptiveDataParallel: torch's DistributedDataParallel whose group can change, and which watches the gradients.

The loader says where in a step the training loop stands; the model arranges its reductions accordingly
(``gradient_group``), keeps earlier micro-batches' gradients out of sight (``hidden_gradients``) and scales the learning
rate around the optimizer's step. Measurements of a step are summed over the replicas by a later step's control
reduction, so that nothing waits for them.
"""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
from torch.nn.parallel import DistributedDataParallel

from dist_core.data.order import StepPlan
from dist_core.errors import InvalidTraining, PeerLost
from dist_core.generations.process_groups import GroupNeeds, ReplicaGroup
from dist_core.goodput import GradientStatistics, gain
from dist_core.gradients.bucket_reducer import BucketLayout, GradientGroup, StepNorms
from dist_core.gradients.earlier_passes import HiddenGradients, around_backward
from dist_core.gradients.learning_rate import ScalingRule, is_known, scaling_rule
from dist_core.gradients.noise.estimator import NoiseScale, from_parts
from dist_core.gradients.noise.norms import AdamPreconditioner, is_adam, segments_of, squared_norm_of_all
from dist_core.gradients.optimizers import asks_its_closure_again, load_optimizer, parameters_of
from dist_core.gradients.patched_calls import (
    intercept_optimizer,
    intercept_scaler,
    intercept_scheduler,
    models_of,
    updating,
)
from dist_core.gradients.reduce import ParameterServer, ReductionStrategy, reduction_strategy
from dist_core.gradients.reduce.autotune import Candidate, Tuner
from dist_core.gradients.schedules import has_ended, schedules_unknown, takes_metric, takes_position
from dist_core.gradients.synchronized_norms import SynchronizedNorms
from dist_core.link.environment import gpu_share
from dist_core.state.states import FunctionState
from dist_core.tensorboard import write_scalars
from dist_core.torch_private import (
    gradient_buckets,
    leave_uncompiled,
    loss_scale_of,
    replace_process_group,
    set_bucket_cap,
)
from dist_core.trial.core import get_core

logger = logging.getLogger(__name__)

AUTO_CAPS_MB = (25.0, 4.0, 100.0)
"""Bucket sizes that ``bucket_cap_mb="auto"`` tries, torch's own first."""


@dataclass(slots=True)
class _Measured:
    """One step's norms on their way to the control reduction."""

    values: torch.Tensor
    """(difference, total), float64: what this replica adds to the sums."""
    arrived: Any
    """CUDA event after which ``values`` are in host memory; None on CPUs."""
    step: int
    num_parts: int
    """Replicas, or one replica's micro-batches, whose gradients are compared with their mean."""
    global_batch: int


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
        _refuse_what_cannot_be_trained(model, optimizers, options)
        if gpu_share() < 1.0 and any(parameter.is_cuda for parameter in model.parameters()):
            torch.cuda.set_per_process_memory_fraction(gpu_share())
        if noise_every is not None and noise_every < 1:
            raise InvalidTraining(f"noise_every is {noise_every}; it must be at least 1 step, or None")
        core = get_core()
        caps: tuple[float | None, ...] = AUTO_CAPS_MB if bucket_cap_mb == "auto" else (None,)
        options.setdefault("gradient_as_bucket_view", True)
        options["bucket_cap_mb"] = None if bucket_cap_mb == "auto" else bucket_cap_mb
        names = [reduction] if isinstance(reduction, str) or not isinstance(reduction, Sequence) else list(reduction)
        strategies = [reduction_strategy(each) for each in names]
        # The model inside is compiled where somebody compiles the wrapper; what arranges its reductions is not.
        leave_uncompiled("dist_core")
        super().__init__(model, process_group=core.group.data, init_sync=False, forward_sync_buffers=False, **options)
        self._core = core
        self._candidates = [Candidate(strategy, cap) for strategy in strategies for cap in caps]
        _refuse_what_cannot_be_timed(self._candidates)
        self._tuner = Tuner(len(self._candidates))
        self._in_use = 0
        self._cap_in_use: float | None = None
        self._optimizers = optimizers
        self._lr_schedulers = [each for each in _as_list(lr_scheduler) if hasattr(each, "step")]
        self._mp_scaler = mp_scaler
        self._kept_schedule_states: list[dict[str, Any]] = []
        """What the trial knows of schedules that are made after their model is wrapped, and have not been yet."""
        self._kept_scaler_state: dict[str, Any] | None = None
        """What the trial knows of a scaler that this process has not seen at work yet."""
        self._rules = _rules_for(scaling_rule, optimizers, core.warn)
        precondition = all(map(is_adam, optimizers)) if preconditioned is None else preconditioned
        self._preconditioner = AdamPreconditioner(optimizers) if precondition else None
        self.noise = NoiseScale()
        self.noise_every = noise_every
        self._server = next((each for each in strategies if isinstance(each, ParameterServer)), None)
        if self._server is not None and len(optimizers) > 1:
            raise InvalidTraining(
                f"parameter_server keeps one optimizer and was given {len(optimizers)}; choose another reduction"
            )
        self._hidden = HiddenGradients(model.parameters())
        self._synchronized_norms = SynchronizedNorms(model)
        self._step: StepPlan | None = None
        self._micro_index = self._last_batch = 0
        self._measures = False
        self._num_parts = 1
        """Replicas that have examples of the present step."""
        self._dry = False
        self._passed_step = False
        """Whether the present micro-batch has come to the optimizer's step."""
        self._probing = False
        """An evaluation loop runs with gradients on; nothing lasts if it turns out to train."""
        self._no_sync = False
        self.user_accumulates = False
        """Whether the user's code sums gradients over several batches of the loader on its own."""
        self._loss_scale: torch.Tensor | None = None
        self._layouts_settled = False
        self._part_norms: list[torch.Tensor] = []
        """Of one replica's micro-batches: their shares of the batch times their gradients' squared norms."""
        self._whole_norm: torch.Tensor | None = None
        self._waiting: deque[_Measured] = deque()
        self._travelling: _Measured | None = None
        self._warned_of_numbers = False
        self.sync_seconds = 0.0
        self._stepped_at = 0.0
        self.stepped = False
        """Whether the optimizer has stepped since the present batch was handed out."""
        self._checked_optimizers = False
        self._is_primary = not core.models
        core.models.append(self)
        for each in optimizers:
            intercept_optimizer(each, self)
        for schedule in self._lr_schedulers:
            intercept_scheduler(schedule, self)
        if mp_scaler is not None:
            intercept_scaler(mp_scaler, self)
        self._gradient_group: GradientGroup = cast("GradientGroup", None)
        self.use_group(core.group)
        core.registry.register(name or core.registry.unique_name("model"), FunctionState(self._save, self._load))

    # ------------------------------------------------------------------ the step as the loader announces it

    def begin_micro_batch(self, step: StepPlan, index: int, *, measures: bool) -> None:
        self._dry = self.stepped = self._passed_step = False
        self._step, self._micro_index, self._measures = step, index, measures
        even = step.global_batch / (self._core.group.world_size * len(step.micro_batches))
        self._synchronized_norms.share = len(step.micro_batches[index]) / even if step.weight else 1.0
        if index > 0:
            return
        # What an earlier step left behind that was given up in its middle.
        self._hidden.drop()
        self._part_norms.clear()
        self._whole_norm = None
        self._last_batch = step.global_batch
        group = self._gradient_group
        group.reduced = False
        group.passive = self._core.group.world_size == 1 or self._server is not None
        group.weight = step.weight
        # DDP divides by the number of replicas; the last micro-batch stands for the others, which were made relative.
        exact = self._core.group.world_size * len(step.micro_batches[-1]) / step.global_batch if step.weight else 0.0
        group.correction = 1.0 if math.isclose(exact, 1.0, rel_tol=1e-12) else exact
        self._num_parts = step.num_parts
        group.measuring = measures and not group.passive and not self.user_accumulates and self._may_measure
        group.measuring = group.measuring and self._num_parts > 1
        group.exactly = group.measuring
        group.norms = StepNorms([], []) if group.measuring else None
        self._loss_scale = None

    @property
    def _may_measure(self) -> bool:
        return self._preconditioner is None or self._preconditioner.ready

    def begin_probe(self) -> None:
        """A loop over evaluation batches begins; should an optimizer step in it, nothing of it counts."""
        self._probing, self.stepped = True, False

    def end_probe(self, *, trained: bool) -> None:
        self._probing = self.stepped = False
        if trained:
            self.drop_gradients()

    def begin_dry_step(self) -> None:
        """A joiner's pass on its own: builds the buckets, changes nothing that lasts."""
        self._dry, self.stepped = True, False
        self._gradient_group.reduced = False
        self._step = None
        self._gradient_group.passive = True
        self._gradient_group.measuring = False

    def rates(self) -> list[float]:
        """The learning rates as the user and the schedules have set them; those that lie on a GPU are left out."""
        groups = (group for optimizer in self._optimizers for group in optimizer.param_groups)
        return [float(rate) for rate in (group["lr"] for group in groups) if not getattr(rate, "is_cuda", False)]

    def leave_step(self) -> None:
        """What comes next is not a step of the loader; of one that was left in its middle nothing stays behind."""
        self._step = None
        self._hidden.drop()
        self._gradient_group.measuring = False

    def end_training_loop(self) -> None:
        self.leave_step()
        if self._server is not None and self._core.group.world_size > 1 and self._core.broken is None:
            parameters = self._trained()
            self._put(self._server.pull(sum(each.numel() for each in parameters), len(self._groups)))

    @property
    def took_gradients(self) -> bool:
        """Whether gradients have come to the buckets since the present step began."""
        return self._gradient_group.reduced

    @property
    def passed_step(self) -> bool:
        """Whether the present micro-batch has come to the step of one of its optimizers."""
        return self._passed_step

    @property
    def is_in_a_part(self) -> bool:
        """Whether the present step takes several passes."""
        return self._step is not None and len(self._step.micro_batches) > 1

    def end_dry_steps(self) -> None:
        """What comes next is not alone any more; no gradient of the dry steps stays."""
        self._dry = False
        self._gradient_group.passive = False
        self.drop_gradients()

    def drop_gradients(self) -> None:
        self._hidden.drop()
        for parameter in self.module.parameters():
            parameter.grad = None

    @property
    def group_needs(self) -> GroupNeeds:
        needs = GroupNeeds()
        for candidate in self._candidates:
            needs |= candidate.strategy.needs
        return needs

    def use_group(self, group: ReplicaGroup) -> None:
        """Reduce over another group from the next step on; all its replicas call this at the same step boundary.

        Raises InvalidTraining when the group lacks what this model's strategies need.
        """
        if group.world_size > 1 and not self.group_needs.met_by(group):
            raise InvalidTraining(
                f"{self._candidates[0].strategy.name} needs process groups that this generation was built without; "
                "wrap models in AdaptiveDataParallel before the first training step"
            )
        self._waiting.clear()
        self._travelling = None
        if self._gradient_group is not None:
            self._gradient_group.close()
        self._tuner.enter(group.world_size, group.num_nodes)
        self._gradient_group = GradientGroup(
            group,
            self._candidates[0].strategy,
            on_first_bucket=self._begin_reduction,
            on_error=self._core.mark_broken,
        )
        self._gradient_group.passive = group.world_size == 1
        if self._preconditioner is not None:
            self._gradient_group.norm_of = self._preconditioner.squared_norm
        replace_process_group(self, self._gradient_group)
        for each in self._candidates:
            # All of them: whoever kept the old group would keep its connections open, by which others learn of a loss.
            each.strategy.enter(group)
        self._use_candidate(self._tuner.candidate, fresh=group.world_size > 1)
        if self._server is not None:
            self._server.serve(self._trained(), self._optimizers[0])

    def _use_candidate(self, index: int, *, fresh: bool = False) -> None:
        """Reduce as this candidate says. ``fresh``: new buckets even if the size is the same, as joiners have them."""
        self._in_use = index
        candidate = self._candidates[index]
        self._gradient_group.strategy = candidate.strategy
        if candidate.cap_mb is not None and (fresh or candidate.cap_mb != self._cap_in_use):
            set_bucket_cap(self, candidate.cap_mb)
            self._cap_in_use = candidate.cap_mb
        self._layouts_settled = False
        self._gradient_group.layouts.clear()

    def _begin_reduction(self) -> None:
        self._note_loss_scale()
        if self._is_primary and self._step is not None:
            self._core.launch_control()

    def _note_loss_scale(self) -> None:
        """As it is during backward: the scaler changes it before the step is over."""
        if self._measures and self._mp_scaler is not None:
            self._loss_scale = loss_scale_of(self._mp_scaler)

    @property
    def is_last_micro_batch(self) -> bool:
        return self._step is None or self._micro_index == len(self._step.micro_batches) - 1

    @property
    def whole_step_is_there(self) -> bool:
        """Whether the gradients are those of a whole step: of its last micro-batch, with no replica lost in it."""
        return self.is_last_micro_batch and self._core.broken is None

    # ------------------------------------------------------------------ forward and backward

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled() or self._evaluates:
            # Evaluation involves no other replica, so replicas may evaluate different numbers of batches.
            return self.module(*inputs, **kwargs)
        if self._step is not None:
            self._core.note_forward()
        if self._reduces_nothing:
            output = self.module(*inputs, **kwargs)
        else:
            output = self._forward_through_reducer(inputs, kwargs)
        step = self._step
        if step is not None and len(step.micro_batches) > 1 and not self.user_accumulates:
            last = self.is_last_micro_batch
            around_backward(
                output,
                begin=self._give_back_gradients if last else None,
                end=self._whole_gradient_is_there if last else self._hide_gradients,
            )
        return output

    @property
    def _evaluates(self) -> bool:
        """Whether this pass belongs to no step of the trial, although gradients are on.

        In evaluation mode: outside of training loops, and in an evaluation loop within one. Frozen batch norms and
        a forgotten ``train()`` make no evaluation of a training loop.
        """
        return not self.training and not self._dry and (self._step is None or self._core.evaluations > 0)

    @property
    def _reduces_nothing(self) -> bool:
        """One replica needs DDP's machinery only to have its buckets in order before others join."""
        return self._core.group.world_size == 1 and not self._dry and self._core.buckets_settled and not self.device_ids

    def _forward_through_reducer(self, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        synchronises = self.is_last_micro_batch and not self._no_sync
        self.require_backward_grad_sync = synchronises
        if synchronises:
            self._gradient_group.begin_backward()
        output = super().forward(*inputs, **kwargs)  # type: ignore[no-untyped-call]  # not annotated in torch
        if synchronises and self._needs_layouts:
            self._read_layouts()
        return output

    @property
    def _needs_layouts(self) -> bool:
        strategy = self._candidates[self._in_use].strategy
        measures = self._gradient_group.norms is not None and self._preconditioner is not None
        return (measures or strategy.reads_layout) and self._core.group.world_size > 1

    def _read_layouts(self) -> None:
        """Which parameters lie where. Buckets are laid out anew once, after the first step of a group."""
        layouts = self._gradient_group.layouts
        if layouts and self._layouts_settled:
            return
        layouts.clear()
        for bucket in gradient_buckets(self):
            description = bucket if self._candidates[self._in_use].strategy.reads_layout else None
            layouts.append(BucketLayout(description, segments_of(bucket.parameters())))
        self._layouts_settled = self._has_rebuilt_buckets

    def _hide_gradients(self) -> None:
        """A micro-batch that is not the last is through its backward pass."""
        step = self._step
        if step is None or self._passed_step:
            # Behind the optimizer's step gradients are another model's, which has this one in its loss.
            return
        self._note_loss_scale()
        self._measure_part(step)
        self._hidden.take(len(step.micro_batches[self._micro_index]) / len(step.micro_batches[-1]))

    def _give_back_gradients(self) -> None:
        several = self._hidden.set_aside(keep_views=self._core.group.world_size > 1)
        if self._core.group.world_size == 1:
            return
        # What DDP reduces is the whole step's gradient.
        self._hidden.give_back()
        if several:
            # Norms of this pass alone say nothing about the sum over several.
            self._gradient_group.measuring = False
            self._gradient_group.norms = None

    @property
    def _splits_to_measure(self) -> bool:
        return self._measures and self._core.group.world_size == 1 and self._may_measure

    def _whole_gradient_is_there(self) -> None:
        """The last micro-batch is through a backward pass. Several replicas have corrected their buckets already."""
        alone = self._core.group.world_size == 1
        if self._step is not None:
            self._measure_part(self._step)
        self._hidden.join(self._gradient_group.correction if alone else 1.0)
        if self._splits_to_measure:
            self._whole_norm = self._norm_of_all()

    def _measure_part(self, step: StepPlan) -> None:
        if self._splits_to_measure:
            share = len(step.micro_batches[self._micro_index]) / step.global_batch
            self._part_norms.append(self._norm_of_all() * share)

    def _norm_of_all(self) -> torch.Tensor:
        """Squared norm of the present gradients."""
        gradients = [
            (parameter, parameter.grad) for parameter in self.module.parameters() if parameter.grad is not None
        ]
        if self._preconditioner is not None:
            return self._preconditioner.squared_norm_of_all(gradients)
        return squared_norm_of_all(gradients)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Gradients of passes within are only summed up locally, to be reduced with the next pass outside."""
        self._accumulate_for_user()
        before, self._no_sync = self._no_sync, True
        try:
            yield
        finally:
            self._no_sync = before

    def _accumulate_for_user(self) -> None:
        if not self.user_accumulates:
            self.user_accumulates = True
            self._gradient_group.measuring = False
            self._core.note_user_accumulation()
            logger.info("gradients are accumulated by the training loop: its steps do not measure the noise scale")

    # ------------------------------------------------------------------ measurements

    def end_step(self) -> None:
        """A step is over on this replica, applied or skipped: what was measured waits for a control reduction."""
        step, norms = self._step, self._gradient_group.norms
        self._gradient_group.measuring = False
        if step is None:
            return
        if not self.stepped and self._mp_scaler is None and not self._core.broken:
            self._note_unapplied_gradients()
        if self.user_accumulates:
            return
        if norms is not None and norms.total:
            values = torch.stack([_sum_of(norms.difference), _sum_of(norms.total)])
        elif self._whole_norm is not None and len(self._part_norms) == len(step.micro_batches):
            values = torch.stack([_sum_of(self._part_norms) - self._whole_norm, self._whole_norm])
        else:
            # Not measured, or in several backward passes a micro-batch, whose sum no part's norm is of.
            return
        self._gradient_group.norms = None
        if self._loss_scale is not None:
            # Gradients in mixed precision are multiplied by the loss scale; their squared norms by its square.
            values = values / self._loss_scale.to(values.device).double() ** 2
        arrived = None
        if values.is_cuda:
            in_host_memory = torch.empty(2, dtype=torch.float64, pin_memory=True)
            values = in_host_memory.copy_(values, non_blocking=True)
            arrived = torch.cuda.current_stream().record_event()
        self._waiting.append(
            _Measured(
                values=values,
                arrived=arrived,
                step=self._core.position.steps,
                num_parts=self._num_parts if norms is not None else len(step.micro_batches),
                global_batch=step.global_batch,
            )
        )

    def _note_unapplied_gradients(self) -> None:
        if any(parameter.grad is not None for parameter in self.module.parameters()):
            self._accumulate_for_user()

    def norms_to_sum(self) -> tuple[float, float]:
        """What this replica adds to the control reduction that is being launched."""
        # On a GPU norms arrive while the next step is computed; one step more, and nobody waits for them.
        age = 1 if not self._waiting or self._waiting[0].arrived is None else 2
        if not self._waiting or self._core.position.steps - self._waiting[0].step < age:
            return 0.0, 0.0
        measured = self._waiting.popleft()
        if measured.arrived is not None:
            measured.arrived.synchronize()
        self._travelling = measured
        return float(measured.values[0]), float(measured.values[1])

    def take_norms(self, first: float, second: float) -> None:
        """The sums over the replicas, the same on all of them."""
        measured, self._travelling = self._travelling, None
        if measured is None:
            return
        sqr, trace = from_parts(
            second + first, second, num_parts=measured.num_parts, global_batch=measured.global_batch
        )
        work = max(1.0, measured.global_batch / self._init_batch)
        if not self.noise.update(sqr, trace, work=work) and self._mp_scaler is None and not self._warned_of_numbers:
            self._warned_of_numbers = True
            self._core.warn(
                f"the gradient was not finite in step {measured.step}: it does not count for the noise scale. Weights "
                "trained with such gradients become NaN; lower the learning rate, clip gradients, or use a GradScaler"
            )

    @property
    def _init_batch(self) -> int:
        return self._core.adaptation.bounds.init_batch if self._core.adaptation is not None else 1

    @property
    def statistics(self) -> GradientStatistics | None:
        """Squared norm of this model's gradient and its variance at the initial batch size, once measured."""
        return self.noise.statistics_at(self._init_batch)

    # ------------------------------------------------------------------ the optimizer, as the user calls it

    def optimizer_step(self, optimizer: torch.optim.Optimizer, original: Any, *args: Any, **kwargs: Any) -> Any:
        """Runs in place of ``optimizer.step``: only once a full step is there, with the scaled learning rate.

        A closure runs in every pass, because its gradients are part of the step; the update waits for all replicas.
        """
        closure, args, kwargs = _without_closure(args, kwargs)
        result = None
        if closure is not None:
            with torch.enable_grad():
                result = closure()
        for model in models_of(optimizer):
            model._refuse_what_is_missing()
            model._passed_step = True
        if self._is_applied(models_of(optimizer)):
            answer = self._update(optimizer, original, args, kwargs)
            result = answer if closure is None else result
        return result

    def _is_applied(self, models: Sequence[AdaptiveDataParallel]) -> bool:
        """Whether an update of now changes the weights: the step is whole, and all replicas have come to it."""
        if self._probing or self._dry:
            self.stepped = True
            # A joiner's last pass: the optimizer makes its state, into which the trial's is received.
            return self._dry and self._core.dry_steps_left == 0
        if self._step is None:
            return True
        if not self.is_last_micro_batch:
            return False
        group = self._gradient_group
        self.sync_seconds = 0.0 if group.passive else max(0.0, time.perf_counter() - group.last_bucket_at)
        if not self._core.await_control():
            return False
        for model in models:
            model.stepped = True
        return self._core.counts_update()

    def _update(self, optimizer: torch.optim.Optimizer, original: Any, args: Any, kwargs: Any) -> Any:
        models = models_of(optimizer)
        if self._dry:
            with updating():
                return original(*args, **kwargs)
        for model in models:
            model.stepped = True
            model._refuse_unreduced()
        if self._step is None:
            for model in models:
                model._gradient_group.reduced = False
            with updating():
                return original(*args, **kwargs)
        self._core.before_update()
        if self._server is not None and self._core.group.world_size > 1:
            self._push()
            return None
        try:
            with self._scaled_rates(optimizer), updating():
                return original(*args, **kwargs)
        finally:
            if self._preconditioner is not None:
                self._preconditioner.stepped(optimizer)
            # Gradients that reach a model later in the step (through a GAN's other half) are not its own step's.
            for model in models:
                model._gradient_group.measuring = False
            if optimizer is self._optimizers[0]:
                self._time_candidate()

    def _refuse_unreduced(self) -> None:
        """An update from gradients of this replica alone would make the replicas' weights differ from now on."""
        if self._core.group.world_size == 1 or self._server is not None or self._gradient_group.reduced:
            return
        if any(each.grad is not None and bool(each.grad.any()) for each in self._trainable()):
            raise InvalidTraining(
                f"an optimizer of {type(self.module).__name__} steps on gradients that were not reduced over the "
                f"{self._core.group.world_size} replicas: the forward pass went around AdaptiveDataParallel, or was "
                "made in evaluation mode outside of a training loop. Call the wrapped model, not the one inside, and "
                "take gradients within a loop over an AdaptiveDataLoader"
            )

    def adopt_schedule(self) -> None:
        """A schedule that was made after the model was wrapped becomes its own, as if it had been given."""
        for optimizer in self._optimizers:
            if models_of(optimizer)[0] is not self:
                continue
            unknown = schedules_unknown(optimizer, self._lr_schedulers)
            # The order of several would not be the same on all replicas.
            if len(unknown) == 1:
                self._lr_schedulers += unknown
                intercept_scheduler(unknown[0], self)
                if self._kept_schedule_states:
                    unknown[0].load_state_dict(self._kept_schedule_states.pop(0))

    def _refuse_what_is_missing(self) -> None:
        """Once, when all is made: what an optimizer trains is in one of its models, and its schedules are known."""
        if self._checked_optimizers:
            return
        self._checked_optimizers = True
        for optimizer in self._optimizers:
            wrapped = {id(each) for model in models_of(optimizer) for each in model.module.parameters()}
            strange = [each for each in parameters_of(optimizer) if each.requires_grad and id(each) not in wrapped]
            if strange:
                raise InvalidTraining(
                    f"{type(optimizer).__name__} trains {len(strange)} parameters that are in no wrapped model, the "
                    f"first of shape {tuple(strange[0].shape)}: their gradients would not be reduced, nor would they "
                    "be in checkpoints. Put them into the model, or wrap their module with the same optimizer too"
                )
            given = [each for model in models_of(optimizer) for each in model._lr_schedulers]
            for schedule in schedules_unknown(optimizer, given):
                raise InvalidTraining(
                    f"{type(schedule).__name__} sets the learning rate of {type(optimizer).__name__} and was not given "
                    "to the model's wrapper: it would begin anew when the trial is resumed or a replica joins, and "
                    "move on in every pass of a step. Give all there are: AdaptiveDataParallel(model, optimizer, "
                    "[first, second])"
                )
        trained = {id(each) for optimizer in self._optimizers for each in parameters_of(optimizer)}
        idle = [name for name, each in self.module.named_parameters() if each.requires_grad and id(each) not in trained]
        if idle:
            self._core.warn(
                f"{len(idle)} parameters of {type(self.module).__name__} require a gradient but are in none of its "
                f"optimizers, {idle[0]!r} first: they stay as they are. Give all optimizers as a list, or set "
                "requires_grad to False"
            )

    def _trainable(self) -> Iterator[torch.nn.Parameter]:
        return (each for each in self.module.parameters() if each.requires_grad)

    @contextmanager
    def _scaled_rates(self, optimizer: torch.optim.Optimizer) -> Iterator[None]:
        factor = self._factor_of(optimizer)
        if factor == 1.0:
            yield
            return
        groups = optimizer.param_groups
        rates = [group["lr"] for group in groups]
        try:
            for group in groups:
                group["lr"] = group["lr"] * factor
            yield
        finally:
            for group, rate in zip(groups, rates, strict=True):
                group["lr"] = rate

    @property
    def _scale(self) -> float:
        """Batch size of the present step, or the last one, in units of the initial one; at least 1."""
        if self._core.adaptation is None or not self._core.adaptation.bounds.adaptive:
            return 1.0
        return max(1.0, self._last_batch / self._init_batch)

    @property
    def learning_rate_factor(self) -> float:
        """What the user's learning rate is multiplied with in this step; the first optimizer's."""
        return self._factor_of(self._optimizers[0])

    def _factor_of(self, optimizer: torch.optim.Optimizer) -> float:
        if self._core.adaptation is None or not self._core.adaptation.bounds.adaptive:
            return 1.0
        progress_steps = self._core.position.progress / self._init_batch
        rule = self._rules[next(index for index, each in enumerate(self._optimizers) if each is optimizer)]
        return rule.factor(self._scale, self.statistics, progress_steps=progress_steps)

    @property
    def gain(self) -> float:
        """Steps at the initial batch size that the present step is worth."""
        statistics = self.statistics
        return 1.0 if statistics is None else float(gain(statistics, self._scale))

    def scheduler_step(self, schedule: Any, original: Any, *args: Any, **kwargs: Any) -> Any:
        """Runs in place of ``lr_scheduler.step``: within a training loop it advances with progress, not with raw steps.

        Outside, after an epoch say, and with arguments (a metric, an epoch number) it is the scheduler's own.
        """
        core = self._core
        if self._dry or (core.position.in_training_loop and (not self.is_last_micro_batch or core.broken is not None)):
            return None
        if core.position.in_training_loop and core.has_made_next_update:
            core.counts_update()
            return None
        if takes_metric(schedule):
            args = _with_metric(core.mean_over_replicas, args, kwargs)
            if core.position.in_training_loop and core.broken is not None:
                return None
        if core.position.in_training_loop:
            core.counts_update()
        if takes_metric(schedule):
            return original(*args, **kwargs)
        if args and core.position.in_training_loop and self._batches_vary and takes_position(schedule):
            # The loop's own count of batches says little when their size changes.
            return original(core.epoch_position)
        if args or kwargs or not core.position.in_training_loop or core.adaptation is None:
            return original(*args, **kwargs)
        if not self._batches_vary:
            return original()
        for _ in range(core.scheduler_steps_due()):
            # The last step of all goes beyond the end, by as much as it is worth.
            if not has_ended(schedule):
                original()
        return None

    @property
    def _batches_vary(self) -> bool:
        return self._core.adaptation is not None and self._core.adaptation.bounds.adaptive

    def to_tensorboard(self, writer: Any, global_step: int, tag_prefix: str = "") -> None:
        """Write the noise scale's parts, gain and learning rate factor as scalars under ``tag_prefix``."""
        values = {"Gain": self.gain, "Learning_Rate_Factor": self.learning_rate_factor}
        statistics = self.statistics
        if statistics is not None:
            values.update(Gradient_Norm_Sqr=statistics.sqr, Gradient_Variance=statistics.var)
        write_scalars(writer, global_step, tag_prefix, values)

    # ------------------------------------------------------------------ choosing how to reduce

    def _time_candidate(self) -> None:
        now, before = time.perf_counter(), self._stepped_at
        self._stepped_at = now
        if self._core.group.world_size > 1 and not self._tuner.settled:
            self._tuner.timed(now - before)

    @property
    def tuning_proposal(self) -> int | None:
        """On rank 0, the candidate to keep once all have been timed; None before, and after it was announced."""
        return self._tuner.proposal

    def tune(self, announced: int | None) -> None:
        """At a step boundary, on all replicas: go to the next candidate, or to the one that rank 0 announced."""
        if self._core.group.world_size == 1 or self._tuner.settled:
            return
        if announced is not None:
            self._tuner.settle(announced)
        else:
            self._tuner.advance()
        if self._tuner.candidate != self._in_use:
            self._use_candidate(self._tuner.candidate)

    # ------------------------------------------------------------------ asynchronous steps

    @property
    def staleness(self) -> int:
        """How many steps replicas may be apart."""
        return 0 if self._server is None else self._server.staleness

    def _trained(self) -> list[torch.nn.Parameter]:
        """The optimizer's parameters, in its order: what a server keeps."""
        return parameters_of(self._optimizers[0])

    @property
    def _groups(self) -> list[dict[str, Any]]:
        groups: list[dict[str, Any]] = self._optimizers[0].param_groups
        return groups

    def _put(self, weights: torch.Tensor) -> None:
        start = 0
        with torch.no_grad():
            for parameter in self._trained():
                parameter.copy_(weights[start : start + parameter.numel()].view(parameter.shape))
                start += parameter.numel()

    def _push(self) -> None:
        assert self._server is not None
        gradient = torch.cat(
            [
                torch.zeros(each.numel()) if each.grad is None else each.grad.detach().reshape(-1).float().cpu()
                for each in self._trained()
            ]
        ).mul_(self._gradient_group.correction)
        try:
            self._put(self._server.push(gradient, [group["lr"] for group in self._groups]))
        except PeerLost as error:
            self._core.mark_broken(str(error))

    # ------------------------------------------------------------------ state

    def _save(self) -> dict[str, Any]:
        kept = self._server.state() if self._server is not None else None
        if kept is not None:
            self._put(kept[0])
            self._optimizers[0].load_state_dict(kept[1])
        state = {
            "module": self.module.state_dict(),
            "optimizers": [each.state_dict() for each in self._optimizers],
            "noise": self.noise.state_dict(),
            "parameters": self._signature(),
            "tuned": self._tuner.state_dict(),
            "lr_schedulers": [*(each.state_dict() for each in self._lr_schedulers), *self._kept_schedule_states],
        }
        if self._mp_scaler is not None:
            state["mp_scaler"] = self._mp_scaler.state_dict()
        return state

    def replicated_tensors(self) -> Iterator[torch.Tensor]:
        """What is the same on all replicas between two steps: weights, and the optimizer's state of them."""
        if self._server is not None:
            return
        yield from self.module.parameters()
        for state in (state for each in self._optimizers for state in each.state.values()):
            yield from (value for value in state.values() if isinstance(value, torch.Tensor) and value.numel())

    def _signature(self) -> list[str]:
        """The trainable parameters in order: replicas reduce them by position."""
        return [
            f"{name} {tuple(parameter.shape)}"
            for name, parameter in self.module.named_parameters()
            if parameter.requires_grad
        ]

    def _load_module(self, state: dict[str, torch.Tensor]) -> None:
        """Copy what is not in place already: a joiner receives weights where they belong, a survivor keeps its own."""
        present = self.module.state_dict()
        elsewhere = {
            name: value
            for name, value in state.items()
            if name not in present
            or not isinstance(value, torch.Tensor)
            or value.data_ptr() != present[name].data_ptr()
            or value.numel() == 0
        }
        if len(elsewhere) == len(state):
            self.module.load_state_dict(state)
        else:
            self.module.load_state_dict(elsewhere, strict=False)

    def _load(self, state: dict[str, Any]) -> None:
        mine, theirs = self._signature(), state["parameters"]
        if mine != theirs:
            index = next((i for i, pair in enumerate(zip(mine, theirs, strict=False)) if pair[0] != pair[1]), None)
            difference = (
                f"this replica has {len(mine)} of them, the trial has {len(theirs)}"
                if index is None
                else f"parameter {index} is {mine[index]!r} here and {theirs[index]!r} in the trial"
            )
            raise InvalidTraining(
                f"the model's parameters differ from the trial's: {difference}. Every replica has to build the same "
                "model in the same order; look for sets, file listings or random choices in the code that builds it"
            )
        self._load_module(state["module"])
        for mine_, theirs_ in zip(self._optimizers, state["optimizers"], strict=True):
            load_optimizer(mine_, theirs_)
        self.noise.load_state_dict(state["noise"])
        self._tuner.load_state_dict(state["tuned"])
        if self._preconditioner is not None:
            self._preconditioner.forget()
        kept = state["lr_schedulers"]
        if len(kept) < len(self._lr_schedulers):
            raise InvalidTraining(
                f"the trial was saved with {len(kept)} learning rate schedules and goes on with "
                f"{len(self._lr_schedulers)}; give the same ones, or begin a new trial"
            )
        for schedule, each in zip(self._lr_schedulers, kept, strict=False):
            schedule.load_state_dict(each)
        self._kept_schedule_states = kept[len(self._lr_schedulers) :]
        self._kept_scaler_state = state.get("mp_scaler")
        self._load_scaler()

    def _load_scaler(self) -> None:
        if self._mp_scaler is not None and self._kept_scaler_state is not None:
            self._mp_scaler.load_state_dict(self._kept_scaler_state)
            self._kept_scaler_state = None

    def adopt_scaler(self, scaler: Any) -> None:
        """A gradient scaler that was not given has begun to work for one of the optimizers: it is the trial's too."""
        if self._mp_scaler is None:
            self._mp_scaler = scaler
            intercept_scaler(scaler, self)
            self._load_scaler()

    # ------------------------------------------------------------------ what torch's class has, and this one replaces

    def register_comm_hook(self, state: object, hook: Any) -> None:
        raise InvalidTraining(
            "AdaptiveDataParallel has no register_comm_hook(): a hook would bypass what makes the gradient of uneven "
            "and accumulated batches exact. Choose a reduction: AdaptiveDataParallel(..., reduction='power_sgd'), or "
            "write one (docs/all_reduce.md)"
        )

    def join(self, *_: Any, **__: Any) -> Any:
        raise InvalidTraining(
            "AdaptiveDataParallel has no join(): AdaptiveDataLoader gives each replica a part of every batch, so that "
            "none ends before the others. Leave it out"
        )


def _refuse_what_cannot_be_trained(
    model: torch.nn.Module, optimizers: Sequence[torch.optim.Optimizer], options: dict[str, Any]
) -> None:
    if not optimizers:
        raise InvalidTraining(f"{type(model).__name__} was wrapped without an optimizer; give at least one")
    for optimizer in optimizers:
        if asks_its_closure_again(optimizer):
            raise InvalidTraining(
                f"{type(optimizer).__name__} evaluates its closure several times within one step, and between them all "
                "replicas would have to agree on where to look; it is not supported. Choose an optimizer that takes "
                "one gradient a step"
            )
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise InvalidTraining(
            f"{type(model).__name__} has no parameter that requires a gradient; there is nothing to train"
        )
    for name in ("process_group", "init_sync", "forward_sync_buffers", "broadcast_buffers"):
        if name in options:
            raise InvalidTraining(
                f"AdaptiveDataParallel was given {name}=; it forms groups and hands over weights and buffers itself, "
                "because the set of replicas changes. Leave it out"
            )


def _refuse_what_cannot_be_timed(candidates: Sequence[Candidate]) -> None:
    for strategy in (candidate.strategy for candidate in candidates if len(candidates) > 1):
        if not strategy.comparable:
            raise InvalidTraining(
                f"{strategy.name} cannot be timed against other reductions or bucket sizes, because a few "
                "early steps do not tell its speed; name it alone, and leave bucket_cap_mb to torch or give a size"
            )


def _as_list(given: Any) -> list[Any]:
    if given is None:
        return []
    return list(given) if isinstance(given, (list, tuple)) else [given]


def _rules_for(
    rule: str | ScalingRule | None, optimizers: Sequence[torch.optim.Optimizer], warn: Callable[[str], None]
) -> list[ScalingRule]:
    for optimizer in optimizers if rule is None else ():
        if not is_known(type(optimizer)):
            warn(
                f"{type(optimizer).__name__} is an optimizer that no scaling rule is known for: its learning rate "
                "grows with the square root of what a larger batch gains. Say scaling_rule='adascale' if its steps "
                "are proportional to the gradient, as those of SGD are"
            )
    return [scaling_rule(rule, optimizer=type(optimizer)) for optimizer in optimizers]


def _without_closure(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """The closure that ``optimizer.step`` was called with, and its other arguments."""
    if args and (args[0] is None or callable(args[0])):
        return args[0], args[1:], kwargs
    return kwargs.get("closure"), args, {name: value for name, value in kwargs.items() if name != "closure"}


def _with_metric(agree: Callable[[float], float], args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """The arguments with the metric replaced by what all replicas agree on; changes ``kwargs`` if it is there."""
    if "metrics" in kwargs:
        kwargs["metrics"] = agree(float(kwargs["metrics"]))
        return args
    return (agree(float(args[0])), *args[1:]) if args else args


def _sum_of(parts: list[torch.Tensor]) -> torch.Tensor:
    if parts[0].is_cuda:
        # Read on this stream, made on the reductions' streams, whose memory must not be used anew before.
        for part in parts:
            part.record_stream(torch.cuda.current_stream())
    return torch.stack(parts).sum()
