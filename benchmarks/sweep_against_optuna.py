"""The demo's sweep against plain ``study.optimize`` in one process: the same 16 parameter sets, sampled beforehand.

Nothing is pruned, so that both do the same work. We run one replica a core, as many trials at a time as that gives,
and grow the last ones. The peer runs twice, with one thread and with as many as torch takes
by itself; the faster one counts.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import optuna

from benchmarks.frame import Measurement

N_TRIALS = 16
ROOT = Path(__file__).resolve().parent.parent


def fixed_study(seed: int = 0) -> optuna.Study:
    """A study whose next trials have fixed parameters, whoever runs them."""
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    drawn = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=seed))
    study = optuna.create_study(direction="maximize", pruner=optuna.pruners.NopPruner())
    for _ in range(N_TRIALS):
        trial = drawn.ask()
        study.enqueue_trial(
            {
                "width": trial.suggest_int("width", 16, 64, log=True),
                "dropout": trial.suggest_float("dropout", 0.0, 0.5),
                "lr": trial.suggest_float("lr", 1e-3, 0.3, log=True),
                "momentum": trial.suggest_float("momentum", 0.0, 0.95),
            }
        )
    return study


def run_plain() -> dict[str, Any]:
    from benchmarks.plain_digits import objective

    study = fixed_study()
    began = time.monotonic()
    study.optimize(objective, n_trials=N_TRIALS)
    return _summary(study, time.monotonic() - began)


def run_elastic() -> dict[str, Any]:
    from examples.digits import objective
    from tuner_bridge import optimize

    study = fixed_study()
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        cores = len(os.sched_getaffinity(0))
        optimize(study, objective, n_trials=N_TRIALS, n_jobs=-1, max_replicas=cores, slots=cores, state_dir=folder)
        return _summary(study, time.monotonic() - began)


def _summary(study: optuna.Study, seconds: float) -> dict[str, Any]:
    values = [trial.value for trial in study.trials if trial.value is not None]
    return {"seconds": seconds, "best": max(values), "median": statistics.median(values)}


def _in_a_process_of_its_own(function: str, **environ: str) -> dict[str, Any]:
    code = f"import json; from benchmarks.sweep_against_optuna import {function}; print(json.dumps({function}()))"
    base = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    printed = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env={**base, **environ}, capture_output=True, text=True, check=True
    ).stdout
    result: dict[str, Any] = json.loads(printed.splitlines()[-1])
    return result


def measure() -> list[Measurement]:
    one_thread = _in_a_process_of_its_own("run_plain", OMP_NUM_THREADS="1")
    all_threads = _in_a_process_of_its_own("run_plain")
    elastic = _in_a_process_of_its_own("run_elastic", OMP_NUM_THREADS="1")
    peer = min(one_thread, all_threads, key=lambda result: result["seconds"])
    details = {"elastic": elastic, "one thread": one_thread, "all threads": all_threads}
    name = "study.optimize in one process"
    return [
        Measurement(
            what="16 trials, wall time",
            ours=elastic["seconds"],
            peer=peer["seconds"],
            unit="s",
            peer_name=name,
            details=details,
        ),
        Measurement(
            what="16 trials, best accuracy",
            ours=elastic["best"],
            peer=peer["best"],
            unit="of 1",
            peer_name=name,
            lower_is_better=False,
        ),
        Measurement(
            what="16 trials, median accuracy",
            ours=elastic["median"],
            peer=peer["median"],
            unit="of 1",
            peer_name=name,
            lower_is_better=False,
        ),
    ]
