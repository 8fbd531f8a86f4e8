"""AdaptiveDataParallel: torch's DistributedDataParallel whose group can change, and which watches the gradients.

A communication hook weighs each bucket by the replica's share of the global batch, so that the reduced gradient is the
exact mean over all examples however they are split, reads the squared norms for the noise scale on measured steps,
and launches the per-step control reduction with the last bucket. A collective that fails marks the step as broken
instead of raising inside the user's backward pass; the broken step is not applied.

Annotations are evaluated here (no ``from __future__ import annotations``): torch compares the hook's with its types.
"""

import threading
import time
import types
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from dist_core._torch_compat import GradBucket, replace_process_group
from dist_core.adaptation import Measurement
from dist_core.all_reduce import reduction_strategy
from dist_core.core import get_core
from dist_core.errors import InvalidTraining, PeerLost
from dist_core.registry import FunctionState
from dist_core.replica_group import ReplicaGroup
from dist_core.sampling import StepPlan
from dist_core.scaling_rules import ScalingRule, scaling_rule

_CHUNK = 16384
"""Length of the partial sums of a squared norm: float32 sums this short keep the error near 1e-8."""


def squared_norm(tensor: torch.Tensor) -> float:
    """Squared Euclidean norm of a flat tensor in one read pass, to about 1e-8 relative."""
    whole = tensor.numel() // _CHUNK * _CHUNK
    total = 0.0
    if whole:
        rows = tensor[:whole].view(-1, _CHUNK)
        total = float(torch.linalg.vector_norm(rows, dim=1).double().square_().sum())
    if whole < tensor.numel():
        total += float(tensor[whole:].double().square_().sum())
    return total


class AdaptiveDataParallel(DistributedDataParallel):
    """Wrap ``model`` and its ``optimizer`` for elastic training.

    ``scaling_rule`` is a name, a ScalingRule, or None for the one that fits the optimizer. ``lr_scheduler`` and
    ``mp_scaler`` (a GradScaler) are checkpointed with the model when given. Raises InvalidTraining for a model without
    trainable parameters.
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
        reduction: str = "all_reduce",
        **options: Any,
    ) -> None:
        if not any(parameter.requires_grad for parameter in model.parameters()):
            raise InvalidTraining(
                f"{type(model).__name__} has no parameter that requires a gradient; there is nothing to train"
            )
        core = get_core()
        options.setdefault("gradient_as_bucket_view", True)
        super().__init__(model, process_group=core.group.data, init_sync=False, forward_sync_buffers=False, **options)
        self._core = core
        self._group = core.group
        self._strategy = reduction_strategy(reduction)
        self._optimizer = optimizer
        self._lr_scheduler = lr_scheduler
        self._mp_scaler = mp_scaler
        self._rule = _rule_for(scaling_rule, optimizer)
        self._step: StepPlan | None = None
        self._micro_index = 0
        self._measures = False
        self._dry = False
        self._lock = threading.Lock()
        self._local = self._total = 0.0
        self._first_norm: float | None = None
        self._last_bucket_at = 0.0
        self.sync_seconds = 0.0
        self._holding = False
        self.stepped = False
        """Whether the optimizer has stepped since the present batch was handed out."""
        self._is_primary = not core.models
        core.models.append(self)
        _intercept_optimizer(optimizer, self)
        _intercept_zero_grad(model, self)
        if mp_scaler is not None:
            _intercept_scaler(mp_scaler, self)
        self.register_comm_hook(None, self._hook)
        if core.joined:
            self.use_group(core.group)
        core.registry.register(name or core.registry.unique_name("model"), FunctionState(self._save, self._load))

    # ------------------------------------------------------------------ the step as the loader announces it

    def begin_micro_batch(self, step: StepPlan, index: int, *, measures: bool) -> None:
        self._dry = False
        self.stepped = False
        if index == 0:
            self._holding = False
            self._local = self._total = 0.0
            self._first_norm = None
        else:
            before, now = len(step.micro_batches[index - 1]), len(step.micro_batches[index])
            if before != now:
                self._scale_gradients(before / now)
        self._step, self._micro_index, self._measures = step, index, measures

    def begin_dry_step(self) -> None:
        """A joiner's pass on its own: builds the buckets, changes nothing that lasts."""
        self._dry = True
        self._holding = False
        self._step = None

    def drop_gradients(self) -> None:
        for parameter in self.module.parameters():
            parameter.grad = None

    def use_group(self, group: ReplicaGroup) -> None:
        self._group = group
        replace_process_group(self, group.data)

    @property
    def is_last_micro_batch(self) -> bool:
        return self._step is None or self._micro_index == len(self._step.micro_batches) - 1

    def _scale_gradients(self, factor: float) -> None:
        gradients = [parameter.grad for parameter in self.module.parameters() if parameter.grad is not None]
        if gradients:
            torch._foreach_mul_(gradients, factor)

    # ------------------------------------------------------------------ forward and backward

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled() or not self.training:
            # Evaluation involves no other replica, so replicas may evaluate different numbers of batches.
            return self.module(*inputs, **kwargs)
        self.require_backward_grad_sync = self.is_last_micro_batch
        try:
            return super().forward(*inputs, **kwargs)  # type: ignore[no-untyped-call]  # not annotated in torch
        except RuntimeError as error:
            if self._group.world_size > 1 and _comes_from_a_collective(error):
                # After a change of group DDP compares bucket layouts here, over the new group.
                raise PeerLost(f"another replica vanished: {error}") from error
            raise

    def _hook(self, state: None, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        buffer = bucket.buffer()
        step = self._step
        if self._dry or step is None:
            return _completed(buffer)
        last = len(step.micro_batches[-1])
        # The buffer sums the micro-batches' mean gradients, each in units of the last one's size.
        buffer.mul_(last / step.global_batch if step.weight else 0.0)
        if self._measures and self._group.world_size > 1 and step.weight:
            norm = squared_norm(buffer) / step.weight
            with self._lock:
                self._local += norm
        if bucket.is_last():
            self._last_bucket_at = time.perf_counter()
            if self._is_primary:
                self._core.launch_control(self._local)
        if self._group.world_size == 1:
            self._reduced(buffer)
            return _completed(buffer)
        try:
            future = self._strategy.reduce(self._group.data, buffer)
        except RuntimeError as error:
            self._core.mark_broken(str(error))
            return _completed(buffer)
        return future.then(lambda done: self._checked(done, buffer))

    def _checked(self, done: torch.futures.Future[torch.Tensor], buffer: torch.Tensor) -> torch.Tensor:
        try:
            reduced = done.value()
        except RuntimeError as error:
            self._core.mark_broken(str(error))
            return buffer
        self._reduced(reduced)
        return reduced

    def _reduced(self, buffer: torch.Tensor) -> None:
        if self._measures:
            norm = squared_norm(buffer)
            with self._lock:
                self._total += norm

    def take_measurement(self, local: float) -> Measurement | None:
        """The squared norms of the step just finished, None on steps that do not measure."""
        step = self._step
        if not self._measures or step is None:
            return None
        if self._group.world_size == 1:
            if self._first_norm is None:
                return None
            local = self._first_norm
        # Gradients in mixed precision are multiplied by the loss scale; their squared norms by its square.
        scale = float(self._mp_scaler.get_scale()) ** 2 if self._mp_scaler is not None else 1.0
        return Measurement(
            local=local / scale,
            total=self._total / scale,
            global_batch=step.global_batch,
            first_batch=len(step.micro_batches[0]),
        )

    # ------------------------------------------------------------------ the optimizer, as the user calls it

    def optimizer_step(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        """Runs in place of ``optimizer.step``: only once a full step is there, with the scaled learning rate."""
        if self._dry:
            return None
        if self._step is None:
            return original(*args, **kwargs)
        if not self.is_last_micro_batch:
            self.defer_step()
            return None
        self.sync_seconds = max(0.0, time.perf_counter() - self._last_bucket_at)
        if not self._core.await_control():
            return None
        self._holding = False
        self.stepped = True
        factor = self.learning_rate_factor
        if factor == 1.0:
            return original(*args, **kwargs)
        rates = [group["lr"] for group in self._optimizer.param_groups]
        try:
            for group in self._optimizer.param_groups:
                group["lr"] = group["lr"] * factor
            return original(*args, **kwargs)
        finally:
            for group, rate in zip(self._optimizer.param_groups, rates, strict=True):
                group["lr"] = rate

    def defer_step(self) -> None:
        """The user stepped before the last micro-batch: keep the gradients, and measure the first part on the way."""
        self._holding = True
        if self._measures and self._group.world_size == 1 and self._micro_index == 0:
            gradients = [parameter.grad for parameter in self.module.parameters() if parameter.grad is not None]
            self._first_norm = sum(squared_norm(gradient.flatten()) for gradient in gradients)

    def release_gradients(self) -> None:
        """A full step was taken, or skipped for its overflowed gradients: they may be cleared."""
        self._holding = False

    def zero_gradients(self, original: Any, *args: Any, **kwargs: Any) -> None:
        """Runs in place of every ``zero_grad``: gradients that are being accumulated stay, wherever it is called."""
        if not self._holding:
            original(*args, **kwargs)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.zero_gradients(super().zero_grad, set_to_none=set_to_none)

    @property
    def learning_rate_factor(self) -> float:
        """What the user's learning rate is multiplied with in this step."""
        adaptation = self._core.adaptation
        if adaptation is None or self._step is None or not adaptation.bounds.adaptive:
            return 1.0
        scale = max(1.0, self._step.global_batch / adaptation.bounds.init_batch)
        progress_steps = self._core.progress / adaptation.bounds.init_batch
        return self._rule.factor(scale, adaptation.noise.statistics, progress_steps=progress_steps)

    # ------------------------------------------------------------------ state

    def _save(self) -> dict[str, Any]:
        state = {"module": self.module.state_dict(), "optimizer": self._optimizer.state_dict()}
        if self._lr_scheduler is not None:
            state["lr_scheduler"] = self._lr_scheduler.state_dict()
        if self._mp_scaler is not None:
            state["mp_scaler"] = self._mp_scaler.state_dict()
        return state

    def _load(self, state: dict[str, Any]) -> None:
        self.module.load_state_dict(state["module"])
        self._optimizer.load_state_dict(state["optimizer"])
        if self._lr_scheduler is not None and "lr_scheduler" in state:
            self._lr_scheduler.load_state_dict(state["lr_scheduler"])
        if self._mp_scaler is not None and "mp_scaler" in state:
            self._mp_scaler.load_state_dict(state["mp_scaler"])


def _rule_for(rule: str | ScalingRule | None, optimizer: torch.optim.Optimizer) -> ScalingRule:
    return scaling_rule(rule, optimizer_name=type(optimizer).__name__)


def _comes_from_a_collective(error: RuntimeError) -> bool:
    words = str(error).lower()
    return any(name in words for name in ("gloo", "nccl", "connection", "process group"))


def _intercept_zero_grad(owner: torch.nn.Module | torch.optim.Optimizer, model: AdaptiveDataParallel) -> None:
    """Let the owner's ``zero_grad`` pass through the model."""
    zero_grad = owner.zero_grad

    def adaptive_zero_grad(_: Any, *args: Any, **kwargs: Any) -> None:
        model.zero_gradients(zero_grad, *args, **kwargs)

    owner.zero_grad = types.MethodType(adaptive_zero_grad, owner)  # type: ignore[method-assign]  # this instance only


def _intercept_scaler(scaler: Any, model: AdaptiveDataParallel) -> None:
    """A gradient scaler must not touch gradients that are being accumulated."""

    def intercept(name: str) -> None:
        original = getattr(scaler, name)

        def adaptive(*args: Any, **kwargs: Any) -> Any:
            if model.is_last_micro_batch:
                result = original(*args, **kwargs)
                if name == "step":
                    model.release_gradients()
                return result
            if name == "step":
                model.defer_step()
            return None

        setattr(scaler, name, adaptive)

    for name in ("unscale_", "step", "update"):
        intercept(name)


def _intercept_optimizer(optimizer: torch.optim.Optimizer, model: AdaptiveDataParallel) -> None:
    """Let calls of this optimizer's ``step`` and ``zero_grad`` pass through the model.

    Both stay bound methods: learning rate schedulers wrap ``step`` as one.
    """
    step = optimizer.step

    def adaptive_step(_: Any, *args: Any, **kwargs: Any) -> Any:
        return model.optimizer_step(step, *args, **kwargs)

    if hasattr(step, "_wrapped_by_lr_sched"):
        # A learning rate scheduler looks for its mark on the optimizer's step, and warns when it is missing.
        adaptive_step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]  # torch's own mark
    optimizer.step = types.MethodType(adaptive_step, optimizer)  # type: ignore[method-assign]  # this instance only
    _intercept_zero_grad(optimizer, model)


def _completed(buffer: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(buffer)
    return future
