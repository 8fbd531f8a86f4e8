"""Population based training beside Ray Tune: what it finds at equal epochs, how long that takes, what a change costs.

Ray runs in an environment of its own: ELASTUNE_RAY_PYTHON names its Python, with ray[tune].
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import optuna

from benchmarks.frame import Measurement
from benchmarks.peers.moving_optimum import HIGHEST_RATE, LOWEST_RATE
from benchmarks.population_training import objective
from tuner_bridge import Population, optimize
from tuner_bridge.optuna.population import MEMBER, PARENT

SEEDS = 10
ROOT = Path(__file__).parents[1]
TOY = {"members": 8, "epochs": 100, "every": 10, "seconds": 0.01, "slots": 4, "megabytes": 0}
LONG = {"members": 16, "epochs": 40, "every": 4, "seconds": 0.1, "slots": 8, "megabytes": 0}
HEAVY = {"members": 4, "epochs": 40, "every": 4, "seconds": 0.2, "slots": 4, "megabytes": 120}


def ours(problem: dict[str, Any], folder: Path, explore: str = "perturb") -> dict[str, Any]:
    """Return the best accuracy, the seconds, and those between a loser's last step and its successor's first."""
    drawn = np.random.default_rng(problem["seed"]).uniform(LOWEST_RATE, HIGHEST_RATE, problem["members"])
    study = optuna.create_study(direction="maximize", sampler=optuna.samplers.RandomSampler(seed=problem["seed"]))
    for rate in drawn:
        study.enqueue_trial({"lr": float(rate)})
    began = time.time()
    optimize(
        study,
        objective,
        population=Population(size=problem["members"], every=problem["every"], seed=problem["seed"], explore=explore),
        slots=problem["slots"],
        max_replicas=1,
        state_dir=folder / "state",
        environ={"PROBLEM": json.dumps(problem), "TRACE_DIR": str(folder), "OMP_NUM_THREADS": "1"},
        live=False,
    )
    ended = time.time()
    trials = {trial.number: trial for trial in study.trials}
    last = problem["epochs"] - 1
    best = max(trial.intermediate_values[last] for trial in trials.values() if last in trial.intermediate_values)
    return {"best": best, "seconds": ended - began, "gaps": gaps_of(trials, folder)}


def gaps_of(trials: dict[int, optuna.trial.FrozenTrial], folder: Path) -> list[float]:
    def steps(number: int) -> list[list[float]]:
        path = folder / f"{number}.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def elastic(number: int) -> int:
        """Return the first stretch of the member's elastic trial, by whose number its steps are noted."""
        while PARENT in trials[number].user_attrs:
            parent = trials[number].user_attrs[PARENT]
            if trials[parent].user_attrs[MEMBER] != trials[number].user_attrs[MEMBER]:
                break
            number = parent
        return number

    gaps = []
    for number, trial in trials.items():
        parent = trial.user_attrs.get(PARENT)
        if parent is None or trials[parent].user_attrs[MEMBER] == trial.user_attrs[MEMBER]:
            continue
        member = trial.user_attrs[MEMBER]
        before = max(each for each in trials if each < number and trials[each].user_attrs[MEMBER] == member)
        lost, taken = steps(elastic(before)), steps(number)
        if lost and taken:
            gaps.append(taken[0][1] - lost[-1][2])
    return gaps


def rays(problem: dict[str, Any], folder: Path) -> dict[str, Any]:
    (folder / "problem.json").write_text(json.dumps(problem))
    done = subprocess.run(
        [os.environ["ELASTUNE_RAY_PYTHON"], str(ROOT / "benchmarks" / "peers" / "population_ray.py"), str(folder)],
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
        env={**os.environ, "OMP_NUM_THREADS": "1", "RAY_AIR_NEW_OUTPUT": "0"},
    )
    if done.returncode:
        raise RuntimeError(done.stderr[-2000:])
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


def paired(problem: dict[str, Any], seed: int) -> tuple[dict[str, Any], dict[str, Any]]:
    with (
        tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as mine,
        tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as theirs,
    ):
        return ours({**problem, "seed": seed}, Path(mine)), rays({**problem, "seed": seed}, Path(theirs))


def measure() -> list[Measurement]:
    if "ELASTUNE_RAY_PYTHON" not in os.environ:
        print("ELASTUNE_RAY_PYTHON is not set: nothing is compared")
        return []
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    toys = [paired(TOY, seed) for seed in range(int(os.environ.get("ELASTUNE_SEEDS", SEEDS)))]
    long_ours, long_rays = paired(LONG, 0)
    heavy_ours, heavy_rays = paired(HEAVY, 0)
    details = {
        "best": [[mine["best"], theirs["best"]] for mine, theirs in toys],
        "seconds": [[mine["seconds"], theirs["seconds"]] for mine, theirs in toys],
    }
    return [
        Measurement(
            what="best accuracy of a moving optimum, 8 members of 100 epochs, mean over seeds",
            ours=statistics.mean(mine["best"] for mine, _ in toys),
            peer=statistics.mean(theirs["best"] for _, theirs in toys),
            unit="points",
            peer_name="Ray Tune",
            lower_is_better=False,
            target=1.0,
            details=details,
        ),
        Measurement(
            what="16 members of 40 epochs of 0.1 s on 8 slots",
            ours=long_ours["seconds"],
            peer=long_rays["seconds"],
            unit="s",
            peer_name="Ray Tune",
            target=0.7,
            details={"work": LONG["members"] * LONG["epochs"] * LONG["seconds"] / LONG["slots"]},
        ),
        Measurement(
            what="from a loser's last step to the first step of its successor, 120 MB of state",
            ours=statistics.median(heavy_ours["gaps"]),
            peer=statistics.median(heavy_rays["gaps"]),
            unit="s",
            peer_name="Ray Tune",
            details={"ours": heavy_ours["gaps"], "ray": heavy_rays["gaps"]},
        ),
    ]
