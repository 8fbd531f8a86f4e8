"""Behaviour of a simulated job: how fast its steps are and how noisy its gradients, at any size and time.

``MeasuredApplication`` reads the tables that the Pollux paper published (OSDI'21, section 5.3): step times by placement
and local batch size on nodes with four T4 GPUs, and gradient statistics by epoch and batch size. Between measurements
it interpolates as the paper's simulator does. ``ModelledApplication`` follows the throughput model itself, for
workloads without measurements.
"""

from __future__ import annotations

import csv
import functools
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from scipy.interpolate import LinearNDInterpolator

from dist_core.goodput import BatchBounds, GradientStatistics, ThroughputParams, optim_seconds
from dist_core.goodput.throughput import gradient_seconds

Floats = NDArray[np.float64]
Shape = tuple[int, ...]
"""Replicas on each used node."""


class Application(Protocol):
    @property
    def name(self) -> str: ...

    @property
    def bounds(self) -> BatchBounds: ...

    @property
    def epoch_ends(self) -> Floats:
        """Progress, in steps at the initial batch size, at which each epoch begins, and the last one ends."""
        ...

    @property
    def fixed_batch(self) -> int | None:
        """Set for a job that trains with this batch on one replica, whatever it is offered."""
        ...

    def step_seconds(self, shape: Shape, atomic_batch: int) -> tuple[float, float]:
        """Return (a whole step, the part of it that waits for the reduction)."""
        ...

    def statistics(self, batch: float, epoch: int) -> GradientStatistics: ...

    def steps_at(self, batch: int, epoch: int) -> float:
        """Return steps with that batch size from the start to this epoch."""
        ...


def _lowest_rotation(shape: Shape) -> Shape:
    return min(shape[turn:] + shape[:turn] for turn in range(len(shape)))


def _rows(path: Path, columns: Sequence[str]) -> list[dict[str, float]]:
    """Return the table's columns as numbers; raise InvalidWorkload with the missing column or the bad line."""
    with open(path, newline="") as file:
        reader = csv.DictReader(file)
        missing = [column for column in columns if column not in (reader.fieldnames or ())]
        if missing:
            raise InvalidWorkload(f"{path} has no column {missing[0]!r}; it needs {', '.join(columns)}")
        rows = []
        for line, row in enumerate(reader, start=2):
            try:
                rows.append({column: float(row[column]) for column in columns})
            except (TypeError, ValueError):
                raise InvalidWorkload(f"{path} line {line}: {row} has something that is not a number") from None
    return rows


@dataclass(frozen=True)
class MeasuredApplication:
    name: str
    bounds: BatchBounds
    epoch_ends: Floats
    fixed_batch: int | None
    _by_shape: Mapping[Shape, Floats]
    """Shape -> rows of (local batch, step, sync), by local batch."""
    _points: Floats
    _values: Floats
    _validation: Mapping[int, Mapping[str, Floats]]
    _step_cache: dict[tuple[Shape, int], tuple[float, float]] = field(default_factory=dict)

    @functools.cached_property
    def _between(self) -> LinearNDInterpolator:
        return LinearNDInterpolator(self._points, self._values)

    def step_seconds(self, shape: Shape, atomic_batch: int) -> tuple[float, float]:
        shape = _lowest_rotation(shape)
        known = self._step_cache.get((shape, atomic_batch))
        if known is not None:
            return known
        rows = self._by_shape.get(shape)
        if rows is not None:
            step, sync = (float(np.interp(atomic_batch, rows[:, 0], rows[:, column])) for column in (1, 2))
        else:
            step, sync = (float(value) for value in self._between([min(len(shape), 16), sum(shape), atomic_batch])[0])
        if not math.isfinite(step):
            raise InvalidWorkload(
                f"{self.name} was not measured near {sum(shape)} replicas on {len(shape)} nodes with {atomic_batch} "
                "samples each; add such a measurement to the traces, or give the jobs fewer replicas"
            )
        self._step_cache[shape, atomic_batch] = step, sync
        return step, sync

    def _at(self, column: str, batch: float, epoch: int) -> float:
        sizes = list(self._validation)
        return float(np.interp(batch, sizes, [self._validation[size][column][epoch] for size in sizes]))

    def statistics(self, batch: float, epoch: int) -> GradientStatistics:
        return GradientStatistics(sqr=self._at("grad_sqr", batch, epoch), var=self._at("grad_var", batch, epoch))

    def steps_at(self, batch: int, epoch: int) -> float:
        return self._at("iteration", batch, epoch)


EPOCHS = {"bert": 2, "cifar10": 100, "ncf": 10, "imagenet": 90, "deepspeech2": 80, "yolov3": 50}
"""Declared lengths in Pollux's evaluation (table 1); other applications train for as many epochs as were measured."""
LARGEST_LOCAL = {"yolov3": 8}
FIXED_BATCH = {"ncf": 32768}


def measured_application(folder: Path) -> MeasuredApplication:
    """Read one application's tables: ``placements.csv``, ``scalability.csv``, ``validation-<batch size>.csv``."""
    name = folder.name
    validation: dict[int, Mapping[str, Floats]] = {}
    columns = ("progress", "iteration", "grad_sqr", "grad_var")
    for path in sorted(folder.glob("validation-*.csv"), key=lambda path: int(path.stem.rpartition("-")[2])):
        rows = _rows(path, columns)
        validation[int(path.stem.rpartition("-")[2])] = {
            column: np.array([row[column] for row in rows]) for column in columns
        }
    if not validation:
        raise InvalidWorkload(f"{folder} holds no validation-<batch size>.csv; the traces have one for each batch size")
    by_shape: dict[Shape, list[tuple[float, float, float]]] = {}
    by_size: dict[tuple[int, int, int], list[tuple[float, float]]] = {}
    placements = _rows(folder / "placements.csv", ("placement", "local_bsz", "step_time", "sync_time"))
    for row in placements:
        shape = tuple(int(digit) for digit in str(int(row["placement"])))
        by_shape.setdefault(_lowest_rotation(shape), []).append((row["local_bsz"], row["step_time"], row["sync_time"]))
        size = len(shape), sum(shape), int(row["local_bsz"])
        by_size.setdefault(size, []).append((row["step_time"], row["sync_time"]))
    points: list[tuple[float, ...]] = [*by_size]
    values = [tuple(np.mean(rows, axis=0)) for rows in by_size.values()]
    for row in _rows(folder / "scalability.csv", ("num_nodes", "num_replicas", "local_bsz", "step_time", "sync_time")):
        points.append((row["num_nodes"], row["num_replicas"], row["local_bsz"]))
        values.append((row["step_time"], row["sync_time"]))
    epochs = min(EPOCHS.get(name, sys.maxsize), *(len(table["progress"]) for table in validation.values()))
    ends = np.min([table["progress"][:epochs] for table in validation.values()], axis=0)
    local = [int(row["local_bsz"]) for row in placements]
    return MeasuredApplication(
        name=name,
        bounds=BatchBounds(
            init_batch=min(validation),
            max_batch=max(validation),
            min_atomic=min(local),
            max_atomic=LARGEST_LOCAL.get(name, max(local)),
        ),
        epoch_ends=np.concatenate([[0.0], ends]),
        fixed_batch=FIXED_BATCH.get(name),
        _by_shape={shape: np.array(sorted(rows)) for shape, rows in by_shape.items()},
        _points=np.array(points, dtype=float),
        _values=np.array(values, dtype=float),
        _validation=validation,
    )


@dataclass(frozen=True)
class ModelledApplication:
    """Follows the throughput model exactly; its noise scale grows from ``first_noise`` to ``last_noise``."""

    name: str
    bounds: BatchBounds
    params: ThroughputParams
    epochs: int
    steps_per_epoch: float
    first_noise: float = 10.0
    last_noise: float = 100.0
    fixed_batch: int | None = None

    @functools.cached_property
    def epoch_ends(self) -> Floats:
        return self.steps_per_epoch * np.arange(self.epochs + 1, dtype=float)

    def step_seconds(self, shape: Shape, atomic_batch: int) -> tuple[float, float]:
        step = float(optim_seconds(self.params, len(shape), sum(shape), atomic_batch))
        return step, max(0.0, step - float(gradient_seconds(self.params, atomic_batch)))

    def statistics(self, batch: float, epoch: int) -> GradientStatistics:
        part = epoch / max(1, self.epochs - 1)
        return GradientStatistics(sqr=1.0, var=self.first_noise * (self.last_noise / self.first_noise) ** part)

    def steps_at(self, batch: int, epoch: int) -> float:
        steps = 0.0
        for index in range(epoch):
            statistics = self.statistics(batch, index)
            scale = batch / self.bounds.init_batch
            worth = (statistics.var + statistics.sqr) / (statistics.var / scale + statistics.sqr)
            steps += self.steps_per_epoch / worth
        return steps


class InvalidWorkload(ValueError):
    """A workload or trace file cannot be used as it is."""
