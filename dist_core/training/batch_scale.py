"""BatchScale: how much larger the present step's batch is than the initial one, and what one model gains by that."""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch

from dist_core.goodput import GradientStatistics, gain
from dist_core.gradients.noise.measurements import Measurements
from dist_core.gradients.scaled_rates import ScaledRates
from dist_core.gradients.step_place import StepPlace
from dist_core.trial.replica import Replica


class BatchScale:
    def __init__(self, core: Replica, place: StepPlace, measurements: Measurements, rates: ScaledRates) -> None:
        self._core = core
        self._place = place
        self._measurements = measurements
        self._rates = rates

    @property
    def init_batch(self) -> int:
        return self._core.adaptation.bounds.init_batch if self._core.adaptation is not None else 1

    @property
    def statistics(self) -> GradientStatistics | None:
        """Squared norm of the model's gradient and its variance at the initial batch size, once measured."""
        return self._measurements.statistics_at(self.init_batch)

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

    def applied_to(self, optimizer: torch.optim.Optimizer) -> AbstractContextManager[None]:
        """Within, the optimizer's learning rates are those of this step."""
        return self._rates.multiplied(optimizer, self.factor_of(optimizer))

    def factor_of(self, optimizer: torch.optim.Optimizer) -> float:
        """Return the factor on the user's learning rate in this step."""
        if not self._adapts:
            return 1.0
        progress_steps = self._core.position.progress / self.init_batch
        return self._rates.factor(optimizer, self._scale, self.statistics, progress_steps=progress_steps)
