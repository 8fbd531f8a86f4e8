"""BatchScale: how much larger the present step's batch is than the initial one, and what that does to its rates."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from dist_core.device import device_of
from dist_core.goodput import GradientStatistics, gain
from dist_core.gradients.learning_rate import ScalingRule, is_known, scaling_rule
from dist_core.gradients.noise.measurements import Measurements
from dist_core.gradients.step_place import StepPlace
from dist_core.trial.replica import Replica


class BatchScale:
    """Ratio of the step's batch to the initial one, and the learning rates that follow from it.

    ``rule``: a name, a ScalingRule, or None for the one that fits each optimizer.
    """

    def __init__(
        self,
        core: Replica,
        place: StepPlace,
        measurements: Measurements,
        optimizers: Sequence[torch.optim.Optimizer],
        rule: str | ScalingRule | None,
    ) -> None:
        for optimizer in optimizers if rule is None else ():
            if not is_known(type(optimizer)):
                core.warn(
                    f"no scaling rule is known for {type(optimizer).__name__}: its learning rate grows with the "
                    "square root of the gain of a larger batch. Set scaling_rule='adascale' if its steps are "
                    "proportional to the gradient, as those of SGD are"
                )
        self._core = core
        self._place = place
        self._measurements = measurements
        self._optimizers = optimizers
        self._rules = [scaling_rule(rule, optimizer=type(optimizer)) for optimizer in optimizers]

    @property
    def init_batch(self) -> int:
        return self._core.adaptation.bounds.init_batch if self._core.adaptation is not None else 1

    @property
    def statistics(self) -> GradientStatistics | None:
        """Squared norm of the model's gradient and its variance at the initial batch size, once measured."""
        return self._measurements.noise.statistics_at(self.init_batch)

    @property
    def _adapts(self) -> bool:
        return self._core.adaptation is not None and self._core.adaptation.bounds.adaptive

    @property
    def _scale(self) -> float:
        """Batch size of the present step, or the last one, in units of the initial one; at least 1."""
        return max(1.0, self._place.last_batch / self.init_batch) if self._adapts else 1.0

    @property
    def gain(self) -> float:
        """Steps at the initial batch size that the present step is worth."""
        statistics = self.statistics
        return 1.0 if statistics is None else float(gain(statistics, self._scale))

    def factor_of(self, optimizer: torch.optim.Optimizer) -> float:
        """Return the factor on the user's learning rate in this step."""
        if not self._adapts:
            return 1.0
        rule = next(rule for rule, each in zip(self._rules, self._optimizers, strict=True) if each is optimizer)
        progress_steps = self._core.position.progress / self.init_batch
        return rule.factor(self._scale, self.statistics, progress_steps=progress_steps)

    @contextmanager
    def applied_to(self, optimizer: torch.optim.Optimizer) -> Iterator[None]:
        """Scale the optimizer's learning rates for this step within the block."""
        factor, groups = self.factor_of(optimizer), optimizer.param_groups
        if factor == 1.0:
            yield
            return
        rates = [group["lr"] for group in groups]
        try:
            for group in groups:
                group["lr"] = group["lr"] * factor
            yield
        finally:
            for group, rate in zip(groups, rates, strict=True):
                group["lr"] = rate

    def rates_as_set(self) -> list[float]:
        """Return the rates that the user and the schedules have set, without those that lie on a GPU."""
        groups = (group for optimizer in self._optimizers for group in optimizer.param_groups)
        return [float(rate) for rate in (group["lr"] for group in groups) if not _is_on_a_gpu(rate)]


def _is_on_a_gpu(rate: Any) -> bool:
    """Tell whether a rate lies on a GPU, where reading it would wait."""
    return isinstance(rate, torch.Tensor) and not device_of(rate).is_host


def write_scalars(writer: Any, global_step: int, tag_prefix: str, values: Mapping[str, float]) -> None:
    """Write each value under ``tag_prefix``, which ends with a slash or gets one."""
    prefix = tag_prefix if not tag_prefix or tag_prefix.endswith("/") else f"{tag_prefix}/"
    for name, value in values.items():
        writer.add_scalar(f"{prefix}{name}", value, global_step)
