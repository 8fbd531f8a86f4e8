"""Gradient noise scale, estimated from squared gradient norms that the reduction sees anyway.

With w_i = b_i / B the share of part i in the global batch, g_i its mean gradient and

    L = sum_i w_i |g_i|^2        T = |sum_i w_i g_i|^2

over K parts, ``sqr = (K T - L) / (K - 1)`` and ``trace = (L - T) B / (K - 1)`` are unbiased for the squared norm of the
true gradient and the trace of the per-example covariance, for any b_i (generalises Pollux, OSDI'21, eq. 9, and
McCandlish et al. 2018, appendix A.1). The parts are the replicas' local batches; one replica takes its batch in several
micro-batches. Differencing successive steps instead would be biased by the progress made between them.

Gradients shrink by orders of magnitude while a model converges, and an average of what they were would speak of long
ago only. So both are averaged in units of their recent magnitude, over a window that grows with the work done, up to
``LONGEST_WINDOW`` steps at the initial batch size. The answer adds one standard error to ``sqr``: late in training
the signal drowns in noise, an estimate near zero would promise that any batch size is free, and the learning rate would
be scaled beyond what is stable. Torch-free: the norms are computed where the gradients are.
"""

from __future__ import annotations

import math
from typing import Any

from dist_core.goodput import GradientStatistics

LONGEST_WINDOW = 1000.0
"""Steps at the initial batch size."""
SHORTEST_WINDOW = 20.0
"""Steps at the initial batch size; fewer would follow single noisy batches."""
LEVEL_MEASUREMENTS = 30.0
"""Measurements that make up the recent magnitude: enough for rare large ones to be among them."""
WINDOW_SHARE = 0.2
"""The window covers this share of the work done so far: early gradients say little about later ones."""

WINDOW_MEASUREMENTS = 8
"""Measurements in a window for several replicas, when steps are worth one each."""
DENSE_STEPS = 40
"""Steps of one replica of which every second is measured."""
SPARSE_EVERY = 10


def is_measured(step: int, *, num_replicas: int, every: int | None) -> bool:
    """Tell whether this step measures the noise scale.

    Often at first, then seldom, unless ``every`` says. One replica has to split its batch for it, so it does less.
    Several take care that enough measurements fall into a window, which is short at first.
    """
    if every is not None:
        return step % every == 0
    if num_replicas > 1:
        return step % min(SPARSE_EVERY, max(1, int(WINDOW_SHARE * step / WINDOW_MEASUREMENTS))) == 0
    return step % (2 if step < DENSE_STEPS else SPARSE_EVERY) == 0


def from_parts(local: float, total: float, *, num_parts: int, global_batch: int) -> tuple[float, float]:
    """(sqr, trace) from L and T of at least two parts of a batch."""
    sqr = (num_parts * total - local) / (num_parts - 1)
    trace = (local - total) * global_batch / (num_parts - 1)
    return sqr, trace


class _Average:
    """Exponentially weighted, with bias correction; knows its standard error."""

    __slots__ = ("norm", "norm_squared", "square", "value")

    def __init__(self) -> None:
        self.value = self.square = self.norm = self.norm_squared = 0.0

    def add(self, value: float, keep: float) -> None:
        self.value = keep * self.value + (1.0 - keep) * value
        self.square = keep * self.square + (1.0 - keep) * value**2
        self.norm = keep * self.norm + (1.0 - keep)
        self.norm_squared = keep**2 * self.norm_squared + (1.0 - keep) ** 2

    @property
    def mean(self) -> float:
        return self.value / self.norm

    @property
    def standard_error(self) -> float:
        """Return the standard error from the spread of the samples and their effective number."""
        spread = max(0.0, self.square / self.norm - self.mean**2)
        return math.sqrt(spread * self.norm_squared) / self.norm

    def to_list(self) -> list[float]:
        return [self.value, self.square, self.norm, self.norm_squared]

    def load(self, values: list[float]) -> None:
        self.value, self.square, self.norm, self.norm_squared = values


class NoiseScale:
    """Running averages of ``sqr`` and ``trace``."""

    def __init__(self) -> None:
        self._sqr, self._trace, self._level = _Average(), _Average(), _Average()
        self._relative_sqr, self._relative_trace = _Average(), _Average()
        self._steps = 0.0
        self.samples = 0

    @property
    def _averages(self) -> dict[str, _Average]:
        return {
            "sqr": self._sqr,
            "trace": self._trace,
            "level": self._level,
            "relative_sqr": self._relative_sqr,
            "relative_trace": self._relative_trace,
        }

    def update(self, sqr: float, trace: float, *, work: float) -> bool:
        """Add one measurement that stands for ``work`` steps at the initial batch size.

        A measurement that is not finite (overflowed mixed-precision gradients) is ignored; returns whether it counted.
        """
        if not (math.isfinite(sqr) and math.isfinite(trace)):
            return False
        self._steps += work
        window = min(LONGEST_WINDOW, max(SHORTEST_WINDOW, WINDOW_SHARE * self._steps))
        keep = math.exp(-work / window)
        self._sqr.add(sqr, keep)
        self._trace.add(trace, keep)
        self._level.add(abs(sqr) + abs(trace), math.exp(-1.0 / LEVEL_MEASUREMENTS))
        level = max(self._level.mean, 1e-300)
        self._relative_sqr.add(sqr / level, keep)
        self._relative_trace.add(trace / level, keep)
        self.samples += 1
        return True

    def statistics_at(self, init_batch: int) -> GradientStatistics | None:
        """Return the statistics with the variance at batch size ``init_batch``; None before enough measurements.

        Estimates below zero are noise and count as tiny.
        """
        if self.samples < 4:
            return None
        level = self._level.mean
        var = max(self._relative_trace.mean / init_batch, 0.0)
        # A negative sqr says that noise drowns the signal: a large batch is efficient, but not infinitely so.
        sqr = max(self._relative_sqr.mean, 1e-3 * var) + self._relative_sqr.standard_error
        return GradientStatistics(sqr=sqr * level, var=var * level)

    @property
    def averages(self) -> tuple[float, float]:
        """The plain averages (sqr, trace), unbiased, of either sign; not a number before the first measurement."""
        if self.samples == 0:
            return math.nan, math.nan
        return self._sqr.mean, self._trace.mean

    def state_dict(self) -> dict[str, Any]:
        averages = {name: average.to_list() for name, average in self._averages.items()}
        return {"averages": averages, "steps": self._steps, "samples": self.samples}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, average in self._averages.items():
            average.load(state["averages"][name])
        self._steps, self.samples = state["steps"], state["samples"]
