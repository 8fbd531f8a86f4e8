"""Summary of a simulation: completion times, makespan and rescales, as a table and as JSON."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from rich import box
from rich.table import Table

from scheduler.simulator.sweep import SweepResult
from scheduler.simulator.world import SimulationResult


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """Figures of one simulation; times in seconds."""

    policy: str
    jobs: int
    mean_completion: float
    median_completion: float
    p99_completion: float
    makespan: float
    rescales_per_job: float
    undone: float
    """Share of the rescales that were taken back before they had paid for their pause."""
    slot_hours: float
    decisions: int
    worst_fairness: float
    """Largest completion time over that alone on an equal share."""
    unfair_jobs: float
    """Share of the jobs that took longer than that."""
    node_hours: float


def summarize(result: SimulationResult) -> Summary:
    times = [job.completion_seconds for job in result.jobs]
    return Summary(
        policy=result.policy,
        jobs=len(times),
        mean_completion=statistics.fmean(times),
        median_completion=statistics.median(times),
        p99_completion=float(np.percentile(times, 99)),
        makespan=result.makespan_seconds,
        rescales_per_job=statistics.fmean(job.num_rescales for job in result.jobs),
        undone=_share(sum(job.num_undone for job in result.jobs), sum(job.num_rescales for job in result.jobs)),
        slot_hours=sum(job.slot_seconds for job in result.jobs) / 3600.0,
        decisions=result.decisions,
        worst_fairness=max(job.finish_time_fairness for job in result.jobs),
        unfair_jobs=statistics.fmean(job.finish_time_fairness > 1.0 for job in result.jobs),
        node_hours=result.node_hours,
    )


def table(summaries: Sequence[Summary]) -> Table:
    """Make a table with one row a policy, and ratios against the first one."""
    title = f"{summaries[0].jobs} jobs; seconds, moves per job, jobs slower than on an equal share"
    made = _narrow(title)
    for heading in ("mean", "of first", "median", "p99", "span", "moves", "undone", "slot h", "unfair"):
        made.add_column(heading, justify="right")
    for row in summaries:
        made.add_row(
            row.policy,
            f"{row.mean_completion:.0f}",
            f"{row.mean_completion / summaries[0].mean_completion:.2f}",
            f"{row.median_completion:.0f}",
            f"{row.p99_completion:.0f}",
            f"{row.makespan:.0f}",
            f"{row.rescales_per_job:.1f}",
            f"{row.undone:.1%}",
            f"{row.slot_hours:.0f}",
            f"{row.unfair_jobs:.0%}",
        )
    return made


def _narrow(title: str) -> Table:
    """Make a table whose columns fit next to each other on a terminal of 80 characters."""
    made = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    made.add_column("policy", no_wrap=True)
    return made


def _share(part: int, whole: int) -> float:
    return part / whole if whole else 0.0


def sweep_table(results: Sequence[SweepResult]) -> Table:
    """Make a table of sweeps with one row a policy."""
    made = _narrow("a sweep; times in minutes")
    for heading in ("span", "best ended", "best value", "ended", "moves", "undone", "slot h"):
        made.add_column(heading, justify="right")
    for row in results:
        made.add_row(
            row.policy,
            f"{row.makespan_seconds / 60:.0f}",
            f"{row.best_finished_seconds / 60:.0f}",
            f"{row.best_value:.3f}",
            f"{row.finished}",
            f"{row.rescales}",
            f"{_share(row.undone, row.rescales):.1%}",
            f"{row.slot_hours:.1f}",
        )
    return made


def to_json(results: Sequence[SimulationResult]) -> list[dict[str, Any]]:
    """Summaries with each job's figures and all changes of allocation."""
    return [
        {
            **asdict(summarize(result)),
            "completions": [asdict(job) for job in result.jobs],
            "allocations": [[at, held] for at, held in result.allocations],
        }
        for result in results
    ]
