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
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
from torch.nn.parallel import DistributedDataParallel

from dist_core._torch_compat import (
    gradient_buckets,
    loss_scale_of,
    replace_process_group,
    set_bucket_cap,
)
from dist_core.all_reduce import ParameterServer, ReductionStrategy, reduction_strategy
from dist_core.all_reduce.autotune import Candidate, Tuner
from dist_core.core import get_core
from dist_core.env import gpu_share
from dist_core.errors import InvalidTraining, PeerLost
from dist_core.goodput import GradientStatistics, gain
from dist_core.gradient_group import BucketLayout, GradientGroup, StepNorms
from dist_core.gradient_norms import AdamPreconditioner, is_adam, segments_of, squared_norm_of_all
from dist_core.hidden_gradients import HiddenGradients, around_backward
from dist_core.interception import intercept_optimizer, intercept_scaler, intercept_scheduler
from dist_core.noise_scale import NoiseScale, from_parts
from dist_core.registry import FunctionState
from dist_core.replica_group import GroupNeeds, ReplicaGroup
from dist_core.sampling import StepPlan
from dist_core.scaling_rules import ScalingRule, scaling_rule
from dist_core.tensorboard import write_scalars

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
    """Wrap ``model`` and its ``optimizer`` for elastic training.

    ``scaling_rule`` is a name, a ScalingRule, or None for the one that fits the optimizer. ``lr_scheduler`` and
    ``mp_scaler`` (a GradScaler) are checkpointed with the model when given; a scheduler that is stepped within the
    training loop then advances with progress. ``reduction`` names a strategy of ``all_reduce``, or several to time
    early on and keep the fastest; ``bucket_cap_mb="auto"`` does the same for the bucket size. ``noise_every`` measures
    the gradient noise scale on every so many steps (None: often at first, then every tenth). ``preconditioned``
    measures it as the optimizer sees gradients (None: for Adam's family). Other options are those of torch's class.

    Raises InvalidTraining for a model without trainable parameters and for names that do not exist.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
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
        _refuse_what_cannot_be_trained(model, options)
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
        super().__init__(model, process_group=core.group.data, init_sync=False, forward_sync_buffers=False, **options)
        self._core = core
        self._candidates = [Candidate(strategy, cap) for strategy in strategies for cap in caps]
        _refuse_what_cannot_be_timed(self._candidates)
        self._tuner = Tuner(len(self._candidates))
        self._in_use = 0
        self._cap_in_use: float | None = None
        self._optimizer = optimizer
        self._lr_scheduler = lr_scheduler
        self._mp_scaler = mp_scaler
        self._rule = _rule_for(scaling_rule, optimizer)
        precondition = is_adam(optimizer) if preconditioned is None else preconditioned
        self._preconditioner = AdamPreconditioner(optimizer) if precondition else None
        self.noise = NoiseScale()
        self.noise_every = noise_every
        self._server = next((each for each in strategies if isinstance(each, ParameterServer)), None)
        self._hidden = HiddenGradients(model.parameters())
        self._step: StepPlan | None = None
        self._micro_index = self._last_batch = 0
        self._measures = False
        self._dry = False
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
        self.partners: list[AdaptiveDataParallel] = []
        """Models wrapped with the same optimizer later on; this one scales its learning rate."""
        self._is_primary = not core.models
        core.models.append(self)
        intercept_optimizer(optimizer, self)
        if lr_scheduler is not None and hasattr(lr_scheduler, "step"):
            intercept_scheduler(lr_scheduler, self)
        if mp_scaler is not None:
            intercept_scaler(mp_scaler, self)
        self._gradient_group: GradientGroup = cast("GradientGroup", None)
        self.use_group(core.group)
        core.registry.register(name or core.registry.unique_name("model"), FunctionState(self._save, self._load))

    # ------------------------------------------------------------------ the step as the loader announces it

    def begin_micro_batch(self, step: StepPlan, index: int, *, measures: bool) -> None:
        self._dry = False
        self.stepped = False
        self._step, self._micro_index, self._measures = step, index, measures
        if index > 0:
            return
        self._part_norms.clear()
        self._whole_norm = None
        self._last_batch = step.global_batch
        group = self._gradient_group
        group.passive = self._core.group.world_size == 1 or self._server is not None
        group.weight = step.weight
        # DDP divides by the number of replicas; the last micro-batch stands for the others, which were made relative.
        exact = self._core.group.world_size * len(step.micro_batches[-1]) / step.global_batch if step.weight else 0.0
        group.correction = 1.0 if math.isclose(exact, 1.0, rel_tol=1e-12) else exact
        group.measuring = measures and not group.passive and not self.user_accumulates and self._may_measure
        group.norms = StepNorms([], []) if group.measuring else None
        self._loss_scale = None

    @property
    def _may_measure(self) -> bool:
        return self._preconditioner is None or self._preconditioner.ready

    def begin_dry_step(self) -> None:
        """A joiner's pass on its own: builds the buckets, changes nothing that lasts."""
        self._dry = True
        self._step = None
        self._gradient_group.passive = True
        self._gradient_group.measuring = False

    def end_training_loop(self) -> None:
        """What comes next is not a step of the loader."""
        self._step = None
        self._gradient_group.measuring = False
        if self._server is not None and self._core.group.world_size > 1 and self._core.broken is None:
            parameters = self._trained()
            self._put(self._server.pull(sum(each.numel() for each in parameters), len(self._optimizer.param_groups)))

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
            self._server.serve(self._trained(), self._optimizer)

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
        if not torch.is_grad_enabled() or not self.training:
            # Evaluation involves no other replica, so replicas may evaluate different numbers of batches.
            return self.module(*inputs, **kwargs)
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
    def _reduces_nothing(self) -> bool:
        """One replica needs DDP's machinery only to have its buckets in order before others join."""
        return self._core.group.world_size == 1 and not self._dry and self._core.buckets_settled and not self.device_ids

    def _forward_through_reducer(self, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        synchronises = self.is_last_micro_batch and not self._no_sync
        self.require_backward_grad_sync = synchronises
        if synchronises:
            self._gradient_group.begin_backward()
        try:
            output = super().forward(*inputs, **kwargs)  # type: ignore[no-untyped-call]  # not annotated in torch
        except RuntimeError as error:
            if self._core.group.world_size > 1 and _comes_from_a_collective(error):
                # After a change of group DDP compares bucket layouts here, over the new group.
                raise PeerLost(f"another replica vanished: {error}") from error
            raise
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
            layouts.append(BucketLayout(bucket, segments_of(bucket.parameters())))
        self._layouts_settled = self._has_rebuilt_buckets

    def _hide_gradients(self) -> None:
        """A micro-batch that is not the last is through its backward pass."""
        step = self._step
        if step is None:
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
                step=self._core.steps,
                num_parts=self._core.group.world_size if norms is not None else len(step.micro_batches),
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
        if not self._waiting or self._core.steps - self._waiting[0].step < age:
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

    def optimizer_step(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        """Runs in place of ``optimizer.step``: only once a full step is there, with the scaled learning rate."""
        if self._dry:
            # A joiner's last pass: the optimizer makes its state, into which the trial's is received.
            if self._core.dry_steps_left == 0:
                return original(*args, **kwargs)
            closure = args[0] if args else kwargs.get("closure")
            return closure() if callable(closure) else None
        if self._step is None:
            return original(*args, **kwargs)
        if not self.is_last_micro_batch:
            return None
        group = self._gradient_group
        self.sync_seconds = 0.0 if group.passive else max(0.0, time.perf_counter() - group.last_bucket_at)
        if not self._core.await_control():
            return None
        for model in (self, *self.partners):
            model.stepped = True
        self._core.before_update()
        if self._server is not None and self._core.group.world_size > 1:
            self._push()
            return None
        try:
            with self._scaled_rates():
                return original(*args, **kwargs)
        finally:
            if self._preconditioner is not None:
                self._preconditioner.stepped()
            # Gradients that reach a model later in the step (through a GAN's other half) are not its own step's.
            for model in (self, *self.partners):
                model._gradient_group.measuring = False
            self._time_candidate()

    @contextmanager
    def _scaled_rates(self) -> Iterator[None]:
        factor = self.learning_rate_factor
        if factor == 1.0:
            yield
            return
        groups = self._optimizer.param_groups
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
        """What the user's learning rate is multiplied with in this step."""
        if self._core.adaptation is None or not self._core.adaptation.bounds.adaptive:
            return 1.0
        progress_steps = self._core.progress / self._init_batch
        return self._rule.factor(self._scale, self.statistics, progress_steps=progress_steps)

    @property
    def gain(self) -> float:
        """Steps at the initial batch size that the present step is worth."""
        statistics = self.statistics
        return 1.0 if statistics is None else float(gain(statistics, self._scale))

    def scheduler_step(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        """Runs in place of ``lr_scheduler.step``: within a training loop it advances with progress, not with raw steps.

        Outside, after an epoch say, and with arguments (a metric, an epoch number) it is the scheduler's own.
        """
        core = self._core
        if self._dry or (core.in_training_loop and (not self.is_last_micro_batch or core.broken is not None)):
            return None
        if args or kwargs or not core.in_training_loop or core.adaptation is None:
            return original(*args, **kwargs)
        result = None
        for _ in range(core.scheduler_steps_due()):
            result = original()
        return result

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
        return [parameter for group in self._optimizer.param_groups for parameter in group["params"]]

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
            self._put(self._server.push(gradient, [group["lr"] for group in self._optimizer.param_groups]))
        except PeerLost as error:
            self._core.mark_broken(str(error))

    # ------------------------------------------------------------------ state

    def _save(self) -> dict[str, Any]:
        kept = self._server.state() if self._server is not None else None
        if kept is not None:
            self._put(kept[0])
            self._optimizer.load_state_dict(kept[1])
        state = {
            "module": self.module.state_dict(),
            "optimizer": self._optimizer.state_dict(),
            "noise": self.noise.state_dict(),
            "parameters": self._signature(),
            "tuned": self._tuner.state_dict(),
        }
        if self._lr_scheduler is not None:
            state["lr_scheduler"] = self._lr_scheduler.state_dict()
        if self._mp_scaler is not None:
            state["mp_scaler"] = self._mp_scaler.state_dict()
        return state

    def replicated_tensors(self) -> Iterator[torch.Tensor]:
        """What is the same on all replicas between two steps: weights, and the optimizer's state of them."""
        if self._server is not None:
            return
        yield from self.module.parameters()
        for state in self._optimizer.state.values():
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
        self._optimizer.load_state_dict(state["optimizer"])
        self.noise.load_state_dict(state["noise"])
        self._tuner.load_state_dict(state["tuned"])
        if self._preconditioner is not None:
            self._preconditioner.forget()
        if self._lr_scheduler is not None and "lr_scheduler" in state:
            self._lr_scheduler.load_state_dict(state["lr_scheduler"])
        if self._mp_scaler is not None and "mp_scaler" in state:
            self._mp_scaler.load_state_dict(state["mp_scaler"])


def _refuse_what_cannot_be_trained(model: torch.nn.Module, options: dict[str, Any]) -> None:
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


def _rule_for(rule: str | ScalingRule | None, optimizer: torch.optim.Optimizer) -> ScalingRule:
    return scaling_rule(rule, optimizer_name=type(optimizer).__name__)


def _sum_of(parts: list[torch.Tensor]) -> torch.Tensor:
    if parts[0].is_cuda:
        # Read on this stream, made on the reductions' streams, whose memory must not be used anew before.
        for part in parts:
            part.record_stream(torch.cuda.current_stream())
    return torch.stack(parts).sum()


def _comes_from_a_collective(error: RuntimeError) -> bool:
    words = str(error).lower()
    return any(name in words for name in ("gloo", "nccl", "connection", "process group"))
