"""ScaledRates: the learning rates of one model's optimizers, during an update as its batch size asks for."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from dist_core.device import device_of
from dist_core.goodput import GradientStatistics
from dist_core.gradients.learning_rate import ScalingRule, is_known, scaling_rule


class ScaledRates:
    """``rule``: a name, a ScalingRule, or None for the one that fits each optimizer."""

    def __init__(
        self,
        rule: str | ScalingRule | None,
        optimizers: Sequence[torch.optim.Optimizer],
        warn: Callable[[str], None],
    ) -> None:
        for optimizer in optimizers if rule is None else ():
            if not is_known(type(optimizer)):
                warn(
                    f"no scaling rule is known for {type(optimizer).__name__}: its learning rate grows with the "
                    "square root of the gain of a larger batch. Set scaling_rule='adascale' if its steps are "
                    "proportional to the gradient, as those of SGD are"
                )
        self._optimizers = optimizers
        self._rules = [scaling_rule(rule, optimizer=type(optimizer)) for optimizer in optimizers]

    def as_set(self) -> list[float]:
        """As the user and the schedules have set them; those that lie on a GPU are left out."""
        groups = (group for optimizer in self._optimizers for group in optimizer.param_groups)
        return [float(rate) for rate in (group["lr"] for group in groups) if not _is_on_a_gpu(rate)]

    def factor(
        self,
        optimizer: torch.optim.Optimizer,
        scale: float,
        statistics: GradientStatistics | None,
        *,
        progress_steps: float,
    ) -> float:
        """Return the factor on its rates for a step at ``scale`` times the initial batch size."""
        rule = next(rule for rule, each in zip(self._rules, self._optimizers, strict=True) if each is optimizer)
        return rule.factor(scale, statistics, progress_steps=progress_steps)

    @contextmanager
    def multiplied(self, optimizer: torch.optim.Optimizer, factor: float) -> Iterator[None]:
        """Within, its rates are ``factor`` times what they are."""
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


def _is_on_a_gpu(rate: Any) -> bool:
    """Reading it would wait."""
    return isinstance(rate, torch.Tensor) and not device_of(rate).is_host
