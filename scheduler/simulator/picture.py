"""Pictures of simulations: who held how many slots when, and how completion times are distributed."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from scheduler.dashboard.picture import NEEDED
from scheduler.errors import SchedulerError
from scheduler.simulator.as_it_ran import AsItRan
from scheduler.simulator.sweep import SweepResult
from scheduler.simulator.world import SimulationResult

try:
    import matplotlib as mpl
    from matplotlib.figure import Figure
except ModuleNotFoundError as missing:
    raise SchedulerError(NEEDED) from missing

UNITS = (("seconds", 1.0, 600.0), ("minutes", 60.0, 3 * 3600.0), ("hours", 3600.0, math.inf))
"""Units of time: name, length in seconds, and the longest time that they are for."""


@dataclass(frozen=True, slots=True)
class _Row:
    name: str
    allocations: Sequence[tuple[float, Mapping[str, int]]]
    """Slots of each job, from so many seconds on."""
    kind_of: Mapping[str, str]
    """A job's application."""
    completion_seconds: Sequence[float]
    makespan_seconds: float


def draw(results: Sequence[SimulationResult], path: Path, ran: AsItRan | None = None) -> None:
    """Draw who held the slots, one row a policy and first of all as it ``ran``, and below all completion times.

    A colour for each application, or for each job where there is one application.
    """
    rows = [_simulated(result) for result in results]
    if ran is not None:
        rows.insert(0, _as_it_ran(ran, rows))
    figure = Figure(figsize=(10, 2.2 * len(rows) + 3.2), layout="constrained")
    axes = figure.subplots(len(rows) + 1, 1, squeeze=False)[:, 0]
    applications = sorted({kind for row in rows for kind in row.kind_of.values()})
    by_job = len(applications) == 1
    kinds = list(dict.fromkeys(job for row in rows for job in row.kind_of)) if by_job else applications
    colors = mpl.color_sequences["tab20" if by_job else "tab10"]
    longest = max(row.makespan_seconds for row in rows)
    unit, seconds = next((unit, seconds) for unit, seconds, most in UNITS if longest < most)
    for axis, row in zip(axes, rows, strict=False):
        times = np.array([*(at for at, _ in row.allocations), row.makespan_seconds]) / seconds
        held = np.zeros((len(kinds), len(times)))
        for column, (_, allocation) in enumerate(row.allocations):
            for job, slots in allocation.items():
                held[kinds.index(job if by_job else row.kind_of[job]), column] += slots
        axis.stackplot(
            times, held, step="post", labels=kinds, colors=[colors[index % len(colors)] for index in range(len(kinds))]
        )
        axis.set_ylabel(f"{row.name}\nslots")
        axis.set_xlim(0, longest / seconds)
    if not by_job:
        axes[0].legend(loc="upper right", ncols=len(applications), fontsize="small")
    axes[len(rows) - 1].set_xlabel(unit)
    for row in rows:
        times = np.sort(row.completion_seconds)
        axes[-1].step(times, np.arange(1, len(times) + 1) / max(1, len(times)), where="post", label=row.name)
    axes[-1].set_xscale("log")
    axes[-1].set_xlabel("completion time, seconds")
    axes[-1].set_ylabel("share of jobs")
    axes[-1].legend()
    figure.savefig(path, dpi=110)


def _simulated(result: SimulationResult) -> _Row:
    return _Row(
        name=result.policy,
        allocations=[
            (at, {job: sum(placement.values()) for job, placement in allocation.items()})
            for at, allocation in result.allocations
        ],
        kind_of={job.name: job.application for job in result.jobs},
        completion_seconds=[job.completion_seconds for job in result.jobs],
        makespan_seconds=result.makespan_seconds,
    )


def _as_it_ran(ran: AsItRan, simulated: Sequence[_Row]) -> _Row:
    return _Row(
        name="as it ran",
        allocations=ran.trained,
        kind_of={job: kind for row in simulated for job, kind in row.kind_of.items()},
        completion_seconds=list(ran.completion_seconds.values()),
        makespan_seconds=ran.makespan_seconds,
    )


def draw_sweeps(results: Sequence[SweepResult], path: Path) -> None:
    """Draw the best value reported so far, over time, and when each policy's best trial ended."""
    figure = Figure(figsize=(9, 4.5), layout="constrained")
    axis = figure.subplots()
    for result in results:
        minutes = [at / 60.0 for at, _ in result.incumbent] + [result.makespan_seconds / 60.0]
        best = [value for _, value in result.incumbent]
        [line] = axis.step(minutes, [*best, best[-1]], where="post", label=result.policy)
        axis.plot(result.best_finished_seconds / 60.0, result.best_value, "o", color=line.get_color())
        axis.axvline(result.makespan_seconds / 60.0, color=line.get_color(), linewidth=0.8, linestyle=":")
    axis.set_xlabel("minutes (dot: the best trial has ended; dotted line: the sweep has)")
    axis.set_ylabel("best value so far")
    axis.legend(loc="lower right")
    figure.savefig(path, dpi=110)
