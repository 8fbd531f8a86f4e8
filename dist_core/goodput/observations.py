"""Measured step times of a trial, by configuration: what the throughput model is fitted to.

A configuration is (nodes, replicas, atomic batch size) on nodes of one kind, with one layout. Each keeps its latest
samples only and answers with their median, because slots are shared and yesterday's contention says little about
today's.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

from dist_core.layout import Layout

SAMPLES_KEPT = 48


class Configuration(NamedTuple):
    num_nodes: int
    num_replicas: int
    atomic_batch: int
    kind: str = ""
    """Kind of the nodes, as the cluster names it; empty where all are alike."""
    layout: str = ""
    """Layout in which its replicas held the model, where that is a choice."""


MOST = 2**31
"""Most replicas, examples or steps in a plausible observation."""


@dataclass(frozen=True, slots=True)
class Observation:
    """Median seconds of one configuration: computing a gradient alone, and computing, reducing and applying it."""

    configuration: Configuration
    gradient_seconds: float
    optim_seconds: float
    count: int

    def to_row(self) -> list[Any]:
        nodes, replicas, atomic, kind, layout = self.configuration
        row = [nodes, replicas, atomic, self.gradient_seconds, self.optim_seconds, self.count]
        if layout:
            return [*row, kind, layout]
        return [*row, kind] if kind else row

    @classmethod
    def from_row(cls, row: list[Any]) -> Observation:
        """Inverse of to_row; raises ValueError on anything that is not a plausible measurement."""
        nodes, replicas, atomic, gradient, optim, count, *names = row
        if not all(isinstance(number, int | float) for number in row[:6]):
            raise ValueError(f"observation {row} has something that is not a number")
        if not (1 <= nodes <= replicas <= MOST and 1 <= atomic <= MOST and 1 <= count <= MOST):
            raise ValueError(
                f"observation {row} is impossible; it must have 1 <= nodes <= replicas <= {MOST}, and a batch size and "
                f"a count from 1 to {MOST}"
            )
        if not (0.0 < gradient < 86400.0 and 0.0 < optim < 86400.0):
            raise ValueError(f"observation {row} has a step time outside (0 s, 1 day)")
        if len(names) > 1:
            Layout.from_name(names[1])
        configuration = Configuration(int(nodes), int(replicas), int(atomic), *(str(name) for name in names[:2]))
        return cls(configuration, gradient, optim, int(count))


class StepProfile:
    """Collects step times and answers with robust observations. Not thread-safe: one training loop owns it."""

    def __init__(self) -> None:
        self._gradient: dict[Configuration, deque[float]] = {}
        self._optim: dict[Configuration, deque[float]] = {}

    def add(self, configuration: Configuration, *, gradient_seconds: float, optim_seconds: float) -> None:
        """Record one optimizer step; non-positive times (a clock that jumped) are ignored."""
        if gradient_seconds <= 0.0 or optim_seconds <= 0.0:
            return
        self._gradient.setdefault(configuration, deque(maxlen=SAMPLES_KEPT)).append(gradient_seconds)
        self._optim.setdefault(configuration, deque(maxlen=SAMPLES_KEPT)).append(optim_seconds)

    def observations(self, *, min_samples: int = 3) -> list[Observation]:
        """Return one row per configuration that has at least ``min_samples`` steps, in a stable order."""
        return [
            Observation(
                configuration,
                statistics.median(self._gradient[configuration]),
                statistics.median(self._optim[configuration]),
                len(self._optim[configuration]),
            )
            for configuration in sorted(self._optim)
            if len(self._optim[configuration]) >= min_samples
        ]

    def restore(self, observations: Iterable[Observation]) -> None:
        """Start from medians that an earlier incarnation of this trial measured."""
        for row in observations:
            repeat = min(row.count, SAMPLES_KEPT)
            self._gradient[row.configuration] = deque([row.gradient_seconds] * repeat, maxlen=SAMPLES_KEPT)
            self._optim[row.configuration] = deque([row.optim_seconds] * repeat, maxlen=SAMPLES_KEPT)
