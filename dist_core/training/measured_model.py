"""MeasuredModel: what code of a user's can ask of a model that it has wrapped, whichever way."""

from __future__ import annotations

from dist_core.goodput import GradientStatistics
from dist_core.gradients.noise.estimator import NoiseScale
from dist_core.training.wrapped_model import WrappedModel


class MeasuredModel:
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
