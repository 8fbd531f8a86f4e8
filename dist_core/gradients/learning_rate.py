"""Learning rate by batch size; the tuner's learning rate is the one at the initial batch size.

A rule answers with the factor on the learning rate for a step at ``scale`` times the initial batch size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from dist_core.errors import InvalidTraining
from dist_core.goodput import GradientStatistics, gain


class ScalingRule(Protocol):
    @property
    def name(self) -> str: ...

    def factor(self, scale: float, statistics: GradientStatistics | None, *, progress_steps: float) -> float:
        """Return the factor on the learning rate.

        ``progress_steps``: work done so far, in steps at the initial batch size.
        """
        ...


@dataclass(frozen=True, slots=True)
class AdaScale:
    """Gain of the step (Johnson et al., ICML'20): for SGD, a step at a larger batch moves as many small ones would."""

    name: str = "adascale"

    def factor(self, scale: float, statistics: GradientStatistics | None, *, progress_steps: float) -> float:
        return 1.0 if statistics is None else float(gain(statistics, scale))


@dataclass(frozen=True, slots=True)
class AdamScale:
    """Square root of the gain: an adaptive optimizer already divides by the gradient's root mean square."""

    name: str = "adamscale"

    def factor(self, scale: float, statistics: GradientStatistics | None, *, progress_steps: float) -> float:
        return 1.0 if statistics is None else float(gain(statistics, scale)) ** 0.5


@dataclass(frozen=True, slots=True)
class LinearScale:
    """Linear scaling rule: the learning rate grows with the batch size (Goyal et al., 2017)."""

    name: str = "linear"

    def factor(self, scale: float, statistics: GradientStatistics | None, *, progress_steps: float) -> float:
        return scale


@dataclass(frozen=True, slots=True)
class SquareRootScale:
    """Krizhevsky 2014."""

    name: str = "sqrt"

    def factor(self, scale: float, statistics: GradientStatistics | None, *, progress_steps: float) -> float:
        return float(scale**0.5)


@dataclass(frozen=True, slots=True, kw_only=True)
class LEGW:
    """Square root scaling with a warm-up that lengthens with the batch size (You et al. 2019)."""

    base_warmup_steps: float
    """Warm-up at the initial batch size, in steps."""
    name: str = "legw"

    def factor(self, scale: float, statistics: GradientStatistics | None, *, progress_steps: float) -> float:
        warmup = max(self.base_warmup_steps * scale, 1e-12)
        return float(scale**0.5) * min(1.0, (progress_steps + 1.0) / warmup)


@dataclass(frozen=True, slots=True)
class NoScale:
    name: str = "none"

    def factor(self, scale: float, statistics: GradientStatistics | None, *, progress_steps: float) -> float:
        return 1.0


_BY_NAME: dict[str, type[AdaScale | AdamScale | LinearScale | SquareRootScale | NoScale]] = {
    "adascale": AdaScale,
    "adamscale": AdamScale,
    "linear": LinearScale,
    "sqrt": SquareRootScale,
    "none": NoScale,
}


_PROPORTIONAL = ("SGD", "ASGD")
"""Optimizers, by class, whose steps are as long as the gradient is."""
_NORMALISING = (
    "Adam", "Adadelta", "Adafactor", "Adagrad", "Adan", "LAMB", "Lamb", "LARS", "Lion", "Muon", "NovoGrad", "Prodigy",
    "RMSprop", "Rprop", "ScheduleFree", "Shampoo", "SOAP", "Sophia",
)  # fmt: skip
"""Parts of the names of those that divide the gradient by what it has been."""


def is_known(optimizer: type) -> bool:
    """Tell whether this optimizer's step lengths are known for less noisy gradients."""
    names = [base.__name__ for base in optimizer.__mro__]
    return any(name in _PROPORTIONAL or _normalises(name) for name in names)


def _normalises(name: str) -> bool:
    return any(part.lower() in name.lower() for part in _NORMALISING)


def scaling_rule(rule: str | ScalingRule | None, *, optimizer: type) -> ScalingRule:
    """Return a rule by name, by value, or (None) the one that fits the class of the optimizer.

    AdaScale where steps are proportional to the gradient. Where they are normalised, and where nobody knows, AdamScale,
    which is the more cautious of the two.
    """
    if rule is None:
        names = [base.__name__ for base in optimizer.__mro__]
        proportional = any(name in _PROPORTIONAL for name in names) and not any(map(_normalises, names))
        return AdaScale() if proportional else AdamScale()
    if isinstance(rule, str):
        if rule not in _BY_NAME:
            known = ", ".join(sorted(_BY_NAME))
            raise InvalidTraining(f"scaling rule {rule!r} is not known; choose one of {known}, or pass a ScalingRule")
        return _BY_NAME[rule]()
    return rule
