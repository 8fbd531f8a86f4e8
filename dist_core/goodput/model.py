"""GoodputModel: one trial's fitted throughput, gradient statistics and batch bounds, and the hints that carry them.

The trainer asks it for the batch size of the allocation it has, the scheduler for the goodput of allocations it could
give, the simulator for both.
"""

from __future__ import annotations

import numbers
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dist_core.goodput.batch_choice import BatchBounds, BatchChoice, choose_batch, choose_batches
from dist_core.goodput.efficiency import GradientStatistics
from dist_core.goodput.layout_terms import MOST_LAYOUTS, LayoutTerms
from dist_core.goodput.observations import Observation
from dist_core.goodput.throughput import ThroughputParams
from dist_core.layout import Layout


@dataclass(frozen=True, slots=True, kw_only=True)
class GoodputModel:
    """Goodput in examples at the initial batch size per second, for any allocation."""

    throughput: ThroughputParams
    statistics: GradientStatistics
    bounds: BatchBounds

    def choose(self, num_nodes: int, num_replicas: int) -> BatchChoice:
        return choose_batch(self.throughput, self.statistics, self.bounds, num_nodes, num_replicas)

    def goodput(self, num_nodes: ArrayLike, num_replicas: ArrayLike) -> NDArray[np.float64]:
        """Best goodput of each allocation, shape (A,)."""
        return choose_batches(self.throughput, self.statistics, self.bounds, num_nodes, num_replicas).goodput


LARGEST_NUMBER = 1e30
"""No trial has more examples, seconds or examples per second than that."""
LARGEST_NOISE_SCALE = 1e12


def _check_number(name: str, value: Any) -> None:
    is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    if not is_number:
        raise ValueError(f"hint {name} is {value!r}; it must be a number")
    if not 0 <= value <= LARGEST_NUMBER:
        raise ValueError(f"hint {name} is {value}; it must be from 0 to {LARGEST_NUMBER:.0e}")


def _statistics(sqr: float, var: float) -> GradientStatistics:
    """Return the gradient's statistics; one that all but vanished has no noise scale, and is bounded, not refused."""
    _check_number("sqr", sqr)
    _check_number("var", var)
    return GradientStatistics(sqr=max(sqr, var / LARGEST_NOISE_SCALE), var=var)


@dataclass(frozen=True, slots=True, kw_only=True)
class Hints:
    """Measurements that a replica reports to the scheduler, checked here at the edge."""

    bounds: BatchBounds | None
    """None before the trial has begun to train."""
    observations: tuple[Observation, ...] = ()
    statistics: GradientStatistics | None = None
    """None until the gradient noise scale was measured."""
    progress: float = 0.0
    """Examples processed times statistical efficiency."""
    target_progress: float | None = None
    """Progress at which the trial's declared epochs end."""
    epoch: int = 0
    epoch_fraction: float = 0.0
    epoch_seconds: float | None = None
    global_batch: int = 0
    goodput: float = 0.0
    """Measured over the last few seconds; what the dashboards show."""
    rescale_pause_seconds: float | None = None
    """Median pause that survivors saw at this trial's rescales; None before the first."""
    last_pause_seconds: float | None = None
    """The latest of these."""
    slots_per_share: int = 1
    """Slots that compute one share of a batch together: 1, or the stages of a pipeline. Observations count shares."""
    layout: str = ""
    """Layout with which its replicas train, where that is a choice."""
    layouts: tuple[LayoutTerms, ...] = ()
    """Layouts that its code can train with, the present one among them."""
    slot_memory_bytes: float | None = None
    """Memory of a slot like its own; None where nothing limits it."""
    learning_rate: float | None = None
    """Learning rate of the first parameter group in the latest step."""

    def __post_init__(self) -> None:
        for name in ("progress", "epoch_fraction", "goodput"):
            _check_number(name, getattr(self, name))
        for name in ("epoch", "global_batch", "slots_per_share"):
            _check_number(name, getattr(self, name))
            if not isinstance(getattr(self, name), numbers.Integral):
                raise ValueError(f"hint {name} is {getattr(self, name)}; it must be a whole number")
        for name in _OPTIONAL_NUMBERS:
            if getattr(self, name) is not None:
                _check_number(name, getattr(self, name))
        if self.bounds is None and self.observations:
            raise ValueError(
                "hint bounds is None but there are observations; a trial that has measured steps must have bounds"
            )
        names = {each.layout for each in self.layouts}
        if len(self.layouts) > MOST_LAYOUTS or len(names) < len(self.layouts):
            raise ValueError(
                f"hint layouts has {len(self.layouts)} entries; it must have at most {MOST_LAYOUTS}, all different"
            )
        if self.layout:
            Layout.from_name(self.layout)
        if self.slots_per_share < 1:
            raise ValueError(f"hint slots_per_share is {self.slots_per_share}; it must be at least 1")

    def to_json(self) -> dict[str, Any]:
        return {
            "bounds": None if self.bounds is None else asdict(self.bounds),
            "observations": [row.to_row() for row in self.observations],
            "statistics": None if self.statistics is None else [self.statistics.sqr, self.statistics.var],
            "layouts": [each.to_row() for each in self.layouts],
            **{name: getattr(self, name) for name in _as_they_are()},
        }

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Hints:
        """Parse and check; raises ValueError or KeyError with the offending field."""
        statistics, bounds = document.get("statistics"), document["bounds"]
        for name, value in (bounds or {}).items():
            if value is not None and not isinstance(value, int):
                raise ValueError(f"batch bound {name} is {value!r}; it must be a whole number")
        return cls(
            bounds=None if bounds is None else BatchBounds(**bounds),
            observations=tuple(Observation.from_row(row) for row in document.get("observations", ())),
            statistics=None if statistics is None else _statistics(*statistics),
            layouts=tuple(LayoutTerms.from_row(row) for row in document.get("layouts", ())),
            **{name: document[name] for name in _as_they_are() if name in document},
        )


_OPTIONAL_NUMBERS = (
    "target_progress",
    "epoch_seconds",
    "rescale_pause_seconds",
    "last_pause_seconds",
    "slot_memory_bytes",
    "learning_rate",
)


def _as_they_are() -> Iterator[str]:
    """Yield the names of fields that JSON has as they are."""
    return (each.name for each in fields(Hints) if each.name not in ("bounds", "observations", "statistics", "layouts"))
