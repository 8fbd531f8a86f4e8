"""Statistical efficiency from the gradient noise scale (Pollux, OSDI'21, section 3.1; AdaScale, ICML'20).

With ``sqr`` the squared norm of the true gradient and ``var`` the trace of the gradient's covariance at the initial
batch size B0, a step at B = s B0 is worth

    gain(s)       = (var + sqr) / (var / s + sqr)          steps at B0, between 1 and s
    efficiency(B) = gain(s) / s                            progress per example relative to B0, in (0, 1]

The gradient noise scale (McCandlish et al. 2018, eq. 2.8) is B0 var / sqr.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray


@dataclass(frozen=True, slots=True)
class GradientStatistics:
    """Squared norm of the gradient and its variance at the initial batch size, both at least 0."""

    sqr: float
    var: float

    def __post_init__(self) -> None:
        for name, value in (("sqr", self.sqr), ("var", self.var)):
            if not math.isfinite(value) or value < 0:
                raise ValueError(f"gradient statistic {name} is {value}; it must be finite and at least 0")


def gain(statistics: GradientStatistics, scale: ArrayLike) -> NDArray[np.float64]:
    """Return steps at the initial batch size that one step at ``scale`` times that size is worth."""
    scale = np.asarray(scale, dtype=float)
    total = statistics.var + statistics.sqr
    if total == 0.0:
        return np.ones_like(scale)
    return np.asarray(total / (statistics.var / scale + statistics.sqr))


def efficiency(statistics: GradientStatistics, scale: ArrayLike) -> NDArray[np.float64]:
    """Progress per example at ``scale`` times the initial batch size; 1 at or below it."""
    scale = np.asarray(scale, dtype=float)
    return np.asarray(np.minimum(gain(statistics, scale) / scale, 1.0))
