"""What a simulated job can train with: layouts, as its code predicts them, and as they truly are."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from dist_core.goodput.layout_terms import LayoutTerms
from dist_core.layout import Layout
from scheduler.simulator.application import Application


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutChoices:
    terms: tuple[LayoutTerms, ...]
    """As it is predicted."""
    applications: Mapping[str, Application]
    """By layout, what is true: shares of a batch, their steps, and the batches that fit into memory."""
    slot_memory_bytes: float

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(sorted({each.layout.slots for each in self.terms}))

    def named(self, layout: str) -> Layout:
        """The one of that name; of a number of slots alone, the one that its code predicts to be the fastest."""
        for each in self.terms:
            if str(each.layout) == layout:
                return each.layout
        slots = Layout.from_name(layout).slots
        alike = [each for each in self.terms if each.layout.slots == slots]
        fitting = [each for each in alike if each.fits(self.slot_memory_bytes)]
        return min(fitting or alike, key=lambda each: (each.seconds, each.layout)).layout

    def fits(self, layout: Layout) -> bool:
        return next(each for each in self.terms if each.layout == layout).fits(self.slot_memory_bytes)

    def only(self, *layouts: str) -> LayoutChoices:
        """With the choice between these."""
        return LayoutChoices(
            terms=tuple(each for each in self.terms if str(each.layout) in layouts),
            applications={name: self.applications[name] for name in layouts},
            slot_memory_bytes=self.slot_memory_bytes,
        )
