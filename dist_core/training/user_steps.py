"""UserSteps: how many steps of the user's own batch the samples of an epoch are worth, for what counts steps."""

from __future__ import annotations

import math
from typing import Literal

from dist_core.errors import InvalidTraining
from dist_core.gradients.step_place import StepPlace
from dist_core.training.loader import AdaptiveDataLoader
from dist_core.trial.replica import Replica

_TOLERANCE = 1e-9


class UserSteps:
    """Converts between samples and steps of the batch size that the user asked for.

    ``batch``: samples of one; ``per_epoch``: how many an epoch has, where that is known.
    """

    def __init__(self, core: Replica, loader: AdaptiveDataLoader, batch: int, per_epoch: int) -> None:
        self._core = core
        self._loader = loader
        self._batch = batch
        self.per_epoch = per_epoch

    def of_epoch_behind(self, place: StepPlace) -> int | None:
        """Return the number of steps of the present epoch, the one that runs included; None where it has no length."""
        size = self._loader.epoch_size
        if size is None:
            return None
        within = (self._progress_behind(place) - self._core.position.epoch * size) / self._batch
        return min(self.per_epoch, math.ceil(within - _TOLERANCE * self.per_epoch))

    def ends_epoch(self, place: StepPlace) -> bool:
        """Tell whether the training loop is over once the running step has counted; False also where nobody knows."""
        size = self._loader.epoch_size
        if size is None:
            return False
        if self._loader.drop_last and not self._loader.bounds.adaptive:
            return self.of_epoch_behind(place) == self.per_epoch
        return self._progress_behind(place) >= (self._core.position.epoch + 1) * size * (1 - _TOLERANCE)

    def _progress_behind(self, place: StepPlace) -> float:
        assert self._core.adaptation is not None and place.step is not None
        return self._core.position.epoch_progress + self._core.adaptation.worth_of(place.step.global_batch)


BatchWord = Literal["fixed", "adaptive"] | int

MOST_GROWTH = 32
"""Most growth of the batch size over the user's, unless the user sets a bound."""


def check_batch_word(batch: object) -> None:
    if batch not in ("fixed", "adaptive") and not (isinstance(batch, int) and batch > 0):
        raise InvalidTraining(
            f"batch is {batch!r}; choose 'fixed', 'adaptive', or the largest number of examples that it may grow to"
        )


def use_batch_word(loader: AdaptiveDataLoader, batch: BatchWord) -> None:
    """Apply a trainer's ``batch=``; passes stay within what the loader was told of them."""
    if batch != "fixed":
        largest = loader.batch_size * MOST_GROWTH if batch == "adaptive" else batch
        loader.autoscale_batch_size(largest, (1, loader.bounds.max_atomic), gradient_accumulation=True)
