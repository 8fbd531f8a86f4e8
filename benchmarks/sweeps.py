"""Sweeps under successive halving in virtual time: our policy against fixed sizes, uniform spreading and top job.

64 configurations on 16 slots of 4 nodes, rungs after 2, 6 and 17 of 50 reports, 30 s a rescale, 30 seeds. Speeds are
those that Pollux's authors measured for ResNet18 on CIFAR-10 (ELASTUNE_POLLUX_TRACES). Learning curves come from the
prior of FT-PFN where the package ``ifbo`` is installed, else from the generator of the simulator.
"""

from __future__ import annotations

import logging
import os
import statistics
from pathlib import Path

import numpy as np

from benchmarks.frame import Measurement
from scheduler.policy import policy_by_name
from scheduler.simulator.application import measured_application
from scheduler.simulator.cluster import SimulationSettings
from scheduler.simulator.sweep import SweepResult, SweepSettings, SweepWorld, learning_curves

SEEDS = 30
REPORTS = 50
CONTENDERS = {
    "ASHA, 1 slot a trial": ("asha_static", 1, 1, 16),
    "ASHA, 4 slots a trial": ("asha_static", 4, 4, 4),
    "uniform spreading": ("fair_share", 1, 8, 16),
    "top job": ("top_job", 1, 8, 16),
    "goodput": ("goodput", 1, 8, 16),
}
"""Policy, replicas at least and at most, trials at a time."""
BASE = "ASHA, 1 slot a trial"


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


def measure(configurations: int = 64, seeds: int = SEEDS) -> list[Measurement]:
    logging.disable(logging.ERROR)
    if "ELASTUNE_POLLUX_TRACES" not in os.environ:
        print("set ELASTUNE_POLLUX_TRACES to the folder of Pollux's measurements; nothing was run")
        return []
    application = measured_application(Path(os.environ["ELASTUNE_POLLUX_TRACES"]) / "cifar10")
    settings = SimulationSettings(nodes=4, slots_per_node=4, decide_every_seconds=15.0)
    results: dict[str, list[SweepResult]] = {name: [] for name in CONTENDERS}
    source = ""
    for seed in range(seeds):
        values, source = curves(configurations, seed)
        for name, (policy, least, most, at_a_time) in CONTENDERS.items():
            sweep = SweepSettings(min_replicas=least, max_replicas=most, at_a_time=at_a_time)
            results[name].append(SweepWorld(values, application, policy_by_name(policy), settings, sweep).sweep())
        print(f"  seed {seed} of {seeds}", flush=True)
    rows = []
    for name, found in results.items():
        if name == BASE:
            continue
        base = results[BASE]
        ours = name == "goodput"
        details = {
            "curves": source,
            "configurations": configurations,
            "finished": statistics.fmean(each.finished for each in found),
            "rescales": statistics.fmean(each.rescales for each in found),
            "best_value": statistics.fmean(each.best_value for each in found),
            "best_value_of_base": statistics.fmean(each.best_value for each in base),
            "score_at_25_50_75_percent_of_base_makespan": [
                statistics.fmean(
                    each.score_at(part * other.makespan_seconds) for each, other in zip(found, base, strict=True)
                )
                for part in (0.25, 0.5, 0.75)
            ],
        }
        for what, unit, pick, target in (
            ("makespan", "h", lambda each: each.makespan_seconds / 3600.0, 1 / 1.7),
            ("time to the best finisher", "h", lambda each: each.best_finished_seconds / 3600.0, 1 / 1.8),
            ("slot hours", "h", lambda each: each.slot_hours, 1.05),
        ):
            rows.append(
                Measurement(
                    what=f"{name}: {what}",
                    ours=statistics.fmean(pick(each) for each in found),
                    peer=statistics.fmean(pick(each) for each in base),
                    unit=unit,
                    peer_name=BASE,
                    target=target if ours else None,
                    details=details,
                )
            )
    return rows
