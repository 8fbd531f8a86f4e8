"""Predicted terms of training with a layout, from a partition: time relative to others, and memory.

Which layout a trial trains with is a choice like its batch size: the scheduler makes it from what steps were measured
to take, and from the prediction where none were. Memory is a bound, not a price.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from dist_core.goodput.batch_choice import BatchBounds
from dist_core.layout import Layout

MOST_LAYOUTS = 64


@dataclass(frozen=True, slots=True)
class LayoutTerms:
    """Predicted time and memory of training with a layout."""

    layout: Layout
    seconds: float
    """Seconds of a pass over a share of a batch, for each example, on a reference device: comparable with those of
    other layouts, and of other trials of the study."""
    fixed_bytes: float = 0.0
    """Bytes on the fullest slot whatever the batch: weights, gradients, the optimizer's state."""
    example_bytes: float = 0.0
    """Activations there, for each example of a pass."""

    def __post_init__(self) -> None:
        for value in (self.seconds, self.fixed_bytes, self.example_bytes):
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            if not (is_number and math.isfinite(value) and value >= 0):
                raise ValueError(f"the layout {self.layout} costs {value!r}; it must be a finite number of at least 0")
        if not self.seconds:
            raise ValueError(f"the layout {self.layout} takes 0 seconds; it must be above 0")

    def most_examples(self, memory_bytes: float) -> float:
        """Return the most examples of a pass on a slot with that memory.

        Infinite if activations take none, below 1 if none fit.
        """
        room = memory_bytes - self.fixed_bytes
        if room < 0:
            return 0.0
        return room / self.example_bytes if self.example_bytes else math.inf

    def fits(self, memory_bytes: float, min_atomic: int = 1) -> bool:
        return self.most_examples(memory_bytes) >= min_atomic

    def bounds(self, bounds: BatchBounds, memory_bytes: float) -> BatchBounds:
        """Return the user's bounds as far as memory allows; the layout has to fit."""
        most = self.most_examples(memory_bytes)
        if not bounds.largest_atomic > most:
            return bounds
        return replace(bounds, max_atomic=max(bounds.min_atomic, int(most)))

    def to_row(self) -> list[Any]:
        return [str(self.layout), self.seconds, self.fixed_bytes, self.example_bytes]

    @classmethod
    def from_row(cls, row: list[Any]) -> LayoutTerms:
        """Read terms from a row of JSON; raise ValueError for anything else."""
        name, seconds, fixed, example = row
        return cls(Layout.from_name(name), seconds, fixed, example)


def usable(terms: Iterable[LayoutTerms], memory_bytes: float, min_atomic: int = 1) -> list[LayoutTerms]:
    """Return the layouts that fit; only those of one slot if the model fits on one slot."""
    fitting = [each for each in terms if each.fits(memory_bytes, min_atomic)]
    alone = [each for each in fitting if each.layout.slots == 1]
    return alone or fitting
