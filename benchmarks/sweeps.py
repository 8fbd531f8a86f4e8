"""Sweeps under successive halving in virtual time: our policy against fixed sizes, uniform spreading and top job.

64 configurations on 16 slots of 4 nodes, rungs after 2, 6 and 17 of 50 reports, 30 s a rescale, 30 seeds; 128
configurations beside them, for a queue that stays full. Speeds are those that Pollux's authors measured for ResNet18 on
CIFAR-10 (ELASTUNE_POLLUX_TRACES). Learning curves come from the prior of FT-PFN where the package ``ifbo`` is
installed, else from the generator of the simulator. Deadlines are parts of the time that ASHA with one slot a trial
takes.
"""

from __future__ import annotations

import logging
import os
import statistics
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.frame import RESULTS, Measurement
from scheduler.simulator.application import measured_application
from scheduler.simulator.cluster import SimulationSettings
from scheduler.simulator.rivals import compared_policy
from scheduler.simulator.sweep import SweepResult, SweepSettings, SweepWorld, learning_curves

SEEDS = 30
SEEDS_FULL_QUEUE = 10
REPORTS = 50
STATIC_1, STATIC_4, UNIFORM, TOP = "ASHA, 1 slot a trial", "ASHA, 4 slots a trial", "uniform spreading", "top job"
CONTENDERS: dict[str, tuple[str, dict[str, Any]]] = {
    STATIC_1: ("asha_static", {"max_replicas": 1}),
    STATIC_4: ("asha_static", {"min_replicas": 4, "max_replicas": 4, "at_a_time": 4}),
    UNIFORM: ("fair_share", {}),
    TOP: ("top_job", {}),
    "goodput": ("goodput", {"goal": "completion_time"}),
    "goodput, time to best": ("goodput", {"goal": "time_to_best"}),
    "goodput, makespan": ("goodput", {"goal": "makespan"}),
    "goodput, budget": ("goodput", {"goal": "budget"}),
}
DEADLINES = (0.25, 0.5, 0.75)
QUANTITIES: dict[str, Callable[[SweepResult], float]] = {
    "makespan": lambda each: each.makespan_seconds / 3600.0,
    "time to the best finisher": lambda each: each.best_finished_seconds / 3600.0,
    "slot hours": lambda each: each.slot_hours,
}
TARGETS = {"makespan": 1 / 1.7, "time to the best finisher": 1 / 1.8, "slot hours": 1.05}


def curves(configurations: int, seed: int) -> tuple[np.ndarray, str]:
    """Larger is better, shape (configurations, reports); and where they come from."""
    try:
        import torch
        from ifbo.priors.ftpfn_prior import DatasetPrior
    except ImportError:
        return learning_curves(configurations, REPORTS, seed=seed), "own generator"
    np.random.seed(seed)
    torch.manual_seed(seed)
    found = DatasetPrior(4, 23).curves_for_configs(np.random.rand(configurations, 4).astype("float32"))
    at = np.arange(1, REPORTS + 1) / REPORTS
    return np.stack([found(at, index) for index in range(configurations)]), "ifbo"


def sweeps_of(seed: int, *, configurations: int, names: tuple[str, ...]) -> dict[str, Any]:
    """All contenders on one seed; deadlines are measured where ``names`` has all of them."""
    logging.disable(logging.ERROR)
    application = measured_application(Path(os.environ["ELASTUNE_POLLUX_TRACES"]) / "cifar10")
    settings = SimulationSettings(nodes=4, slots_per_node=4, decide_every_seconds=15.0)
    values, source = curves(configurations, seed)

    def run(policy: str, **options: Any) -> SweepResult:
        sweep = SweepSettings(**options)
        return SweepWorld(values, application, compared_policy(policy), settings, sweep).sweep()

    found: dict[str, Any] = {name: run(CONTENDERS[name][0], **CONTENDERS[name][1]) for name in names}
    scores = {}
    for part in DEADLINES if UNIFORM in names and len(names) == len(CONTENDERS) else ():
        until = part * found[STATIC_1].makespan_seconds
        ours = run("goodput", goal="deadline", deadline_seconds=until)
        scores[part] = ours.score_at(until), found[UNIFORM].score_at(until)
    return {"results": found, "scores": scores, "source": source}


def measure() -> list[Measurement]:
    if "ELASTUNE_POLLUX_TRACES" not in os.environ:
        print("set ELASTUNE_POLLUX_TRACES to the folder of Pollux's measurements; nothing was run")
        return []
    few = (STATIC_1, UNIFORM, "goodput", "goodput, time to best")
    with ProcessPoolExecutor(2) as pool:
        all_of = partial(sweeps_of, configurations=64, names=tuple(CONTENDERS))
        found = list(pool.map(all_of, range(SEEDS)))
        full = list(pool.map(partial(sweeps_of, configurations=128, names=few), range(SEEDS_FULL_QUEUE)))
    draw(found, RESULTS / "sweeps.png")
    return [
        *_rows(found, "64 configurations", targets=TARGETS),
        *_rows(full, "128 configurations", targets={}),
        *_deadline_rows(found),
        _budget_row(found),
    ]


def draw(found: list[dict[str, Any]], path: Path) -> None:
    """Time to the best finisher and to the sweep's end, a box for each contender over the seeds."""
    from matplotlib.figure import Figure

    names = [name for name in CONTENDERS if name in found[0]["results"]]
    figure = Figure(figsize=(9, 4), layout="constrained")
    for axis, quantity in zip(figure.subplots(1, 2, sharey=True), list(QUANTITIES)[:2], strict=True):
        hours = [[QUANTITIES[quantity](each["results"][name]) for each in found] for name in names]
        axis.boxplot(hours, orientation="horizontal", tick_labels=names)
        axis.set_xlabel(f"{quantity} (hours)")
    figure.savefig(path, dpi=110)


def _rows(found: list[dict[str, Any]], what: str, *, targets: dict[str, float]) -> list[Measurement]:
    rows = []
    base = [seed["results"][STATIC_1] for seed in found]
    for name in found[0]["results"]:
        mine = [seed["results"][name] for seed in found]
        if name == STATIC_1:
            continue
        details = {
            "curves": found[0]["source"],
            "seeds": len(found),
            "finished": statistics.fmean(each.finished for each in mine),
            "rescales": statistics.fmean(each.rescales for each in mine),
            "best_value": statistics.fmean(each.best_value for each in mine),
            "best_value_of_base": statistics.fmean(each.best_value for each in base),
        }
        for quantity, pick in QUANTITIES.items():
            rows.append(
                Measurement(
                    what=f"{what}, {name}: {quantity}",
                    ours=statistics.fmean(pick(each) for each in mine),
                    peer=statistics.fmean(pick(each) for each in base),
                    unit="h",
                    peer_name=STATIC_1,
                    target=targets.get(quantity) if name.startswith("goodput, time") else None,
                    details=details,
                )
            )
    return rows


def _deadline_rows(found: list[dict[str, Any]]) -> list[Measurement]:
    rows = []
    for part in DEADLINES:
        scores = [seed["scores"][part] for seed in found]
        rows.append(
            Measurement(
                what=f"best score at {part:.0%} of ASHA's time",
                ours=statistics.fmean(ours for ours, _ in scores),
                peer=statistics.fmean(uniform for _, uniform in scores),
                unit="",
                peer_name=UNIFORM,
                lower_is_better=False,
                target=1.0,
                details={
                    "seeds_below": sum(ours < uniform for ours, uniform in scores),
                    "seeds_above": sum(ours > uniform for ours, uniform in scores),
                    "worst": min(ours - uniform for ours, uniform in scores),
                },
            )
        )
    return rows


def _budget_row(found: list[dict[str, Any]]) -> Measurement:
    mine, static = ([seed["results"][name] for seed in found] for name in ("goodput, budget", STATIC_4))
    return Measurement(
        what="slot hours with the goal budget",
        ours=statistics.fmean(each.slot_hours for each in mine),
        peer=statistics.fmean(each.slot_hours for each in static),
        unit="h",
        peer_name=STATIC_4,
        target=0.6,
        details={
            "best_value": statistics.fmean(each.best_value for each in mine),
            "best_value_of_peer": statistics.fmean(each.best_value for each in static),
        },
    )
