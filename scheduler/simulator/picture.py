"""Pictures of simulations: who held how many slots when, and how completion times are distributed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import matplotlib as mpl
import numpy as np
from matplotlib.figure import Figure

from scheduler.simulator.sweep import SweepResult
from scheduler.simulator.world import SimulationResult

UNITS = (("seconds", 1.0, 600.0), ("minutes", 60.0, 3 * 3600.0), ("hours", 3600.0, math.inf))
"""Of time, their length in seconds, and how long what they are for takes at most."""


def draw(results: Sequence[SimulationResult], path: Path) -> None:
    """One row a policy with its allocations by application, and the completion times of all below."""
    rows = len(results)
    figure = Figure(figsize=(10, 2.2 * rows + 3.2), layout="constrained")
    axes = figure.subplots(rows + 1, 1, squeeze=False)[:, 0]
    applications = sorted({job.application for result in results for job in result.jobs})
    colors = mpl.color_sequences["tab10"]
    palette = {name: colors[index % len(colors)] for index, name in enumerate(applications)}
    longest = max(result.makespan_seconds for result in results)
    unit, seconds = next((unit, seconds) for unit, seconds, most in UNITS if longest < most)
    for axis, result in zip(axes[:rows], results, strict=True):
        kind_of = {job.name: job.application for job in result.jobs}
        times = np.array([*(at for at, _ in result.allocations), result.makespan_seconds]) / seconds
        held = np.zeros((len(applications), len(times)))
        for column, (_, allocation) in enumerate(result.allocations):
            for job, placement in allocation.items():
                held[applications.index(kind_of[job]), column] += sum(placement.values())
        axis.stackplot(times, held, step="post", labels=applications, colors=[palette[name] for name in applications])
        axis.set_ylabel(f"{result.policy}\nslots")
        axis.set_xlim(0, longest / seconds)
    axes[0].legend(loc="upper right", ncols=len(applications), fontsize="small")
    axes[rows - 1].set_xlabel(unit)
    for result in results:
        times = np.sort([job.completion_seconds for job in result.jobs])
        axes[rows].step(times, np.arange(1, len(times) + 1) / len(times), where="post", label=result.policy)
    axes[rows].set_xscale("log")
    axes[rows].set_xlabel("completion time, seconds")
    axes[rows].set_ylabel("share of jobs")
    axes[rows].legend()
    figure.savefig(path, dpi=110)


def draw_sweeps(results: Sequence[SweepResult], path: Path) -> None:
    """The best value reported so far, over time, and when each policy's best trial ended."""
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
