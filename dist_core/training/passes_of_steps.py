"""PassesOfSteps: what is the same of the passes of a model's steps, whether all of it is here or a part."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from dist_core.gradients.earlier_passes import EarlierGradients
from dist_core.gradients.noise.measurements import Measurements
from dist_core.gradients.step_place import StepPlace
from dist_core.trial.participants import Passes, Reduction


class PassesOfSteps(Passes):
    """Passes of steps, through a whole model or a part of one.

    ``over``: what sums gradients; ``measurements``: of their noise.
    """

    def __init__(
        self, parameters: Sequence[torch.nn.Parameter], place: StepPlace, over: Reduction, measurements: Measurements
    ) -> None:
        self._parameters = list(parameters)
        self.place = place
        self.over = over
        self.measurements = measurements
        self._earlier_gradients = EarlierGradients(self._parameters)

    @property
    def awaits_update(self) -> bool:
        return False

    def take_back_gradients(self) -> None: ...

    def look_at_loss(self, loss: torch.Tensor) -> None: ...

    def end_probe(self, *, trained: bool) -> None:
        self.place.end_probe()
        if trained:
            self.drop_gradients()

    def begin_dry(self) -> None:
        """Begin a joiner's pass on its own, which makes what steps need and changes nothing that lasts."""
        self.place.begin_dry_step()
        summing = self.over.group
        summing.reduced = False
        summing.passive, summing.measuring = True, False

    def end_dry(self) -> None:
        self.place.is_dry = False
        self.over.group.passive = False
        self.drop_gradients()

    def leave(self) -> None:
        self.place.leave()
        self._earlier_gradients.drop()
        self.over.group.measuring = False

    def drop_gradients(self) -> None:
        self._earlier_gradients.drop()
        for parameter in self._parameters:
            parameter.grad = None

    @property
    def took_gradients(self) -> bool:
        """Tell whether gradients have come since the present step began."""
        return self.over.group.reduced
