"""Profile of a study: its trials' measurements as one model, because trials of one study run the same code.

Their step times differ by what the tuner varies (a wider layer), mostly by a factor. So the rows of all trials, each
divided by its trial's factor, make one throughput model; a trial's own model is that one times its factor, from the
first step on. Where the fit misses what was measured with some number of replicas, it is corrected there. The gradient
noise of earlier trials at a given part of their length tells what later ones will see (Pollux, OSDI'21, section 3.1:
the noise scale grows while training proceeds).

With step times scaled by s the best batch size of every allocation stays, and goodput is divided by s. Goodput by
number of replicas is therefore tabulated once for a study and noise level, and shared by its trials.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dist_core.goodput import (
    BatchBounds,
    Configuration,
    GoodputModel,
    GradientStatistics,
    Observation,
    ThroughputParams,
    fit_throughput,
    optim_seconds,
)

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]
T = TypeVar("T")

ROWS_PER_ALLOCATION = 6
"""Batch sizes kept for each (nodes, replicas): a fit gains little from more, and takes longer."""
MOST_ALLOCATIONS = 24
PRIOR_ROWS = 0.3
"""Weight of the belief that the fit is right, in rows, against what was measured with a number of replicas."""
NOISE_STEP = 0.1
"""Resolution of the tables, in log units of the noise scale: goodput changes by a few per cent at most."""
NOISE_BINS = 20
"""Parts of a trial's declared length over which its noise is remembered."""


@dataclass(frozen=True, slots=True)
class StudyProfile:
    """The pooled model; its unit of time is that of the trial with the most rows (factor 1)."""

    params: ThroughputParams
    corrections: tuple[tuple[int, float], ...] = ()
    """(replicas, log of measured over predicted step time), by replicas."""
    most_replicas: int = 1
    """Largest number of replicas that anything was measured with."""
    typical_factor: float = 1.0
    _tables: dict[object, Floats] = field(default_factory=dict, compare=False, repr=False)

    def surprise(self, rows: Sequence[Observation], factor: float) -> float:
        """Mean distance, in log units, of what a trial of that factor measured from what the model says."""
        nodes, replicas, atomic = _columns(row.configuration for row in rows)
        believed = optim_seconds(self.params, nodes, replicas, atomic) * self.slowdown(replicas) * factor
        measured = np.array([row.optim_seconds for row in rows])
        return float(np.abs(np.log(measured / believed)).mean())

    def slowdown(self, replicas: Integers) -> Floats:
        """Measured over predicted step time, by replicas; beyond what was measured a trial is let to try."""
        if not self.corrections:
            return np.ones(len(replicas))
        counts, logs = (np.array(column) for column in zip(*self.corrections, strict=True))
        found = np.interp(np.log(replicas), np.log(counts), logs)
        found = np.where(replicas > counts[-1], min(float(logs[-1]), 0.0), found)
        return np.asarray(np.exp(found))

    def goodput(self, bounds: BatchBounds, noise: float, nodes: ArrayLike, replicas: ArrayLike) -> Floats:
        """Best goodput of each allocation, examples at the initial batch size a second."""
        model = GoodputModel(throughput=self.params, statistics=GradientStatistics(sqr=1.0, var=noise), bounds=bounds)
        return model.goodput(nodes, replicas) / self.slowdown(np.atleast_1d(np.asarray(replicas)))

    def table(
        self, bounds: BatchBounds, noise: float, node_slots: int, counts: Integers, *, slots_per_share: int = 1
    ) -> Floats:
        """Return the goodput of packed allocations of so many slots, of one share at least; remembered.

        ``noise`` is rounded to the tables' resolution.
        """
        level = -1 if noise <= 0.0 else round(math.log1p(noise) / NOISE_STEP)
        key = bounds, level, node_slots, counts.tobytes(), slots_per_share
        if key not in self._tables:
            rounded = 0.0 if level < 0 else math.expm1(level * NOISE_STEP)
            shares, nodes = np.maximum(1, counts // slots_per_share), -(-counts // node_slots)
            self._tables[key] = self.goodput(bounds, rounded, np.minimum(nodes, shares), shares)
        return self._tables[key]


@dataclass(frozen=True, slots=True)
class TrialModel:
    """One trial's goodput by allocation: its study's profile, its factor, and its present noise."""

    profile: StudyProfile
    bounds: BatchBounds
    noise: float
    """var / sqr at the initial batch size, as measured last."""
    factor: float = 1.0
    kind: str = ""
    """Kind of the nodes that the profile was measured on."""
    elsewhere: Mapping[str, tuple[StudyProfile, float]] = field(default_factory=dict)
    """Profile and factor on nodes of other kinds."""
    slots_per_share: int = 1
    """Slots that compute one share of a batch together, as the stages of a pipeline do."""

    @property
    def most_profiled(self) -> int:
        return self.profile.most_replicas * self.slots_per_share

    @property
    def most_useful(self) -> int:
        return self.bounds.max_useful_replicas() * self.slots_per_share

    def on(self, kind: str) -> TrialModel:
        """Return the model on a kind of nodes.

        Unmeasured kinds are taken to be like those that were, with one replica seen.
        """
        if kind == self.kind:
            return self
        others = {**self.elsewhere, self.kind: (self.profile, self.factor)}
        profile, factor = others.pop(kind, (None, self.factor))
        if profile is None:
            profile = replace(self.profile, corrections=(), most_replicas=1, _tables={})
        return replace(self, profile=profile, factor=factor, kind=kind, elsewhere=others)

    def slower(self, times: float) -> TrialModel:
        """Return the model of the same trial with steps that take ``times`` as long."""
        others = {kind: (profile, factor * times) for kind, (profile, factor) in self.elsewhere.items()}
        return replace(self, factor=self.factor * times, elsewhere=others)

    def goodput(self, nodes: ArrayLike, replicas: ArrayLike) -> Floats:
        """Best goodput of each allocation, shape (A,), examples at the initial batch size a second."""
        return self.profile.goodput(self.bounds, self.noise, nodes, replicas) / self.factor

    def curve(self, node_slots: int, counts: Integers) -> Floats:
        """Return the goodput of packed allocations of so many slots on nodes of that size; remembered.

        A part of what computes a share is worth that part of it, so that speeds can be compared slot by slot.
        """
        size = self.slots_per_share
        if size == 1:
            return self.profile.table(self.bounds, self.noise, node_slots, counts) / self.factor
        whole = self.profile.table(self.bounds, self.noise, node_slots, counts, slots_per_share=size)
        return np.asarray(whole / self.factor * np.minimum(1.0, counts / size))


def noise_bin(fraction: float) -> int:
    return min(NOISE_BINS - 1, max(0, int(fraction * NOISE_BINS)))


def noise_at(noise_by_bin: Mapping[int, float], fraction: float) -> float | None:
    """Return the noise of the nearest part of a trial's length that any trial has reached.

    None if none was measured.
    """
    if not noise_by_bin:
        return None
    wanted = noise_bin(fraction)
    return noise_by_bin[min(noise_by_bin, key=lambda known: (abs(known - wanted), known))]


def pool(
    histories: Mapping[str, Sequence[Observation]],
) -> tuple[StudyProfile, dict[str, float]] | None:
    """Return a profile and each trial's factor, from what a study's trials have measured on one kind of nodes.

    None without a row.
    """
    rows_of = {name: {row.configuration: row for row in rows} for name, rows in histories.items() if rows}
    if not rows_of:
        return None
    order = sorted(rows_of, key=lambda name: (-len(rows_of[name]), name))
    pooled: _Pooled = {}
    factors: dict[str, float] = {}
    apart: list[str] = []
    for name in order:
        own_rows = rows_of[name]
        ratios = [own_rows[key].optim_seconds / pooled[key][0].optim for key in own_rows.keys() & pooled.keys()]
        if pooled and not ratios:
            apart.append(name)
            continue
        _add(pooled, own_rows, factors.setdefault(name, statistics.median(ratios) if ratios else 1.0))
    params = _fit(pooled)
    for name in apart:
        # Nothing in common with the others but the code: the model says what they would have measured.
        own_rows = rows_of[name]
        ratios = [row.optim_seconds / _predicted(params, key) for key, row in own_rows.items()]
        _add(pooled, own_rows, factors.setdefault(name, statistics.median(ratios)))
    if apart:
        params = _fit(pooled)
    profile = StudyProfile(
        params=params,
        corrections=_corrections(params, pooled),
        most_replicas=max(key.num_replicas for key in pooled),
        typical_factor=statistics.median(factors.values()),
    )
    return profile, factors


class _Row(NamedTuple):
    gradient: float
    optim: float
    samples: int


_Pooled = dict[Configuration, list[_Row]]


def _add(pooled: _Pooled, rows: Mapping[Configuration, Observation], factor: float) -> None:
    for key, row in rows.items():
        scaled = _Row(row.gradient_seconds / factor, row.optim_seconds / factor, row.count)
        pooled.setdefault(key, []).append(scaled)


def _fit(pooled: _Pooled) -> ThroughputParams:
    by_allocation: dict[tuple[int, int], list[Configuration]] = {}
    for key in sorted(pooled):
        by_allocation.setdefault((key.num_nodes, key.num_replicas), []).append(key)
    chosen: list[Configuration] = []
    for keys in evenly_spread(list(by_allocation.values()), MOST_ALLOCATIONS):
        chosen += evenly_spread(keys, ROWS_PER_ALLOCATION)
    params = fit_throughput([_median(key, pooled[key]) for key in chosen])
    assert params is not None
    return params


def evenly_spread(items: Sequence[T], most: int) -> list[T]:
    """Return at most ``most`` items, evenly spread, with the first and the last."""
    if len(items) <= most:
        return list(items)
    return [items[round(index * (len(items) - 1) / (most - 1))] for index in range(most)]


def _median(key: Configuration, rows: Sequence[_Row]) -> Observation:
    return Observation(
        key,
        statistics.median(row.gradient for row in rows),
        statistics.median(row.optim for row in rows),
        sum(row.samples for row in rows),
    )


def _columns(keys: Iterable[Configuration]) -> tuple[Integers, Integers, Integers]:
    """Nodes, replicas and atomic batch sizes."""
    rows = np.array([key[:3] for key in keys])
    return rows[:, 0], rows[:, 1], rows[:, 2]


def _predicted(params: ThroughputParams, key: Configuration) -> float:
    return float(optim_seconds(params, key.num_nodes, key.num_replicas, key.atomic_batch))


def _corrections(params: ThroughputParams, pooled: _Pooled) -> tuple[tuple[int, float], ...]:
    keys = list(pooled)
    nodes, replicas, atomic = _columns(keys)
    measured = np.array([statistics.median(row.optim for row in pooled[key]) for key in keys])
    logs = np.log(measured / optim_seconds(params, nodes, replicas, atomic))
    return tuple(
        (int(count), float(logs[replicas == count].sum() / ((replicas == count).sum() + PRIOR_ROWS)))
        for count in np.unique(replicas)
    )
