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
from benchmarks.peers import moving_optimum, small_convnet
from benchmarks.population_training import objective
from tuner_bridge import Population, optimize
from tuner_bridge.optuna.population import MEMBER, PARENT

SEEDS = 10
ROOT = Path(__file__).parents[1]
MOVING = {
    "name": "moving_optimum",
    "between": [moving_optimum.LOWEST_RATE, moving_optimum.HIGHEST_RATE],
    "logarithmic": False,
    "megabytes": 0,
    "explore": "perturb",
}
TOY = {**MOVING, "members": 8, "epochs": 100, "every": 10, "seconds": 0.01, "slots": 4}
LONG = {**MOVING, "members": 16, "epochs": 40, "every": 4, "seconds": 0.1, "slots": 8}
HEAVY = {**MOVING, "members": 4, "epochs": 40, "every": 4, "seconds": 0.2, "slots": 4, "megabytes": 120}
CONVNET = {
    **MOVING,
    "name": "small_convnet",
    "between": [small_convnet.LOWEST_RATE, small_convnet.HIGHEST_RATE],
    "logarithmic": True,
    "members": 8,
    "epochs": 20,
    "every": 2,
    "seconds": 0.0,
    "slots": 2,
}


def drawn(problem: dict[str, Any]) -> list[float]:
    """Return the rates that the members begin with."""
    random, (lowest, highest) = np.random.default_rng(problem["seed"]), problem["between"]
    if problem["logarithmic"]:
        return [float(each) for each in np.exp(random.uniform(np.log(lowest), np.log(highest), problem["members"]))]
    return [float(each) for each in random.uniform(lowest, highest, problem["members"])]


def ours(problem: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Return the best accuracy, the seconds, and those between a loser's last step and its successor's first."""
    study = optuna.create_study(direction="maximize", sampler=optuna.samplers.RandomSampler(seed=problem["seed"]))
    for rate in problem["rates"]:
        study.enqueue_trial({"lr": rate})
    size, every, seed = problem["members"], problem["every"], problem["seed"]
    began = time.time()
    optimize(
        study,
        objective,
        population=Population(size=size, every=every, seed=seed, explore=problem["explore"]),
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
    problem = {**problem, "seed": seed}
    problem["rates"] = drawn(problem)
    with (
        tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as mine,
        tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as theirs,
    ):
        return ours(problem, Path(mine)), rays(problem, Path(theirs))


def over_seeds(what: str, problem: dict[str, Any], peer_name: str) -> Measurement:
    """Compare the best of each seed; ``not_below``: seeds in which ours is at least the peer's."""
    pairs = [paired(problem, seed) for seed in range(int(os.environ.get("ELASTUNE_SEEDS", SEEDS)))]
    return Measurement(
        what=f"{what}, mean over {len(pairs)} seeds",
        ours=statistics.mean(mine["best"] for mine, _ in pairs),
        peer=statistics.mean(theirs["best"] for _, theirs in pairs),
        unit="points",
        peer_name=peer_name,
        lower_is_better=False,
        target=1.0,
        details={
            "not_below": sum(mine["best"] >= theirs["best"] for mine, theirs in pairs),
            "best": [[mine["best"], theirs["best"]] for mine, theirs in pairs],
            "seconds": [[mine["seconds"], theirs["seconds"]] for mine, theirs in pairs],
        },
    )


def measure() -> list[Measurement]:
    if "ELASTUNE_RAY_PYTHON" not in os.environ:
        print("ELASTUNE_RAY_PYTHON is not set: nothing is compared")
        return []
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    long_ours, long_rays = paired(LONG, 0)
    heavy_ours, heavy_rays = paired(HEAVY, 0)
    toy, small = "best accuracy of a moving optimum, 8 members of 100 epochs", "a small convolutional network"
    return [
        over_seeds(toy, TOY, "Ray Tune"),
        over_seeds(f"{toy}, PB2", {**TOY, "explore": "pb2"}, "Ray Tune's PB2"),
        over_seeds(f"test accuracy of {small}, 8 members of 20 epochs", CONVNET, "Ray Tune"),
        Measurement(
            what="16 members of 40 epochs of 0.1 s on 8 slots",
            ours=long_ours["seconds"],
            peer=long_rays["seconds"],
            unit="s",
            peer_name="Ray Tune",
            target=0.7,
            details={"work": 16 * 40 * 0.1 / 8},
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
