"""Fifty live sweeps on emulated devices, one after another: every goal and pruner, few and many jobs, a killed replica.

All have to end, with every trial accounted for. How long each takes is compared with the others of its kind.
ELASTUNE_SWEEPS changes how many there are.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any, get_args

import optuna
import psutil

from benchmarks.emulated_trial import trains
from benchmarks.frame import Measurement
from trials.terms import Goal, StudyTerms
from tuner_bridge import optimize

SWEEPS = 50
SLOTS = 8
TRIALS = 12
EMULATED = "2x4:resnet50-imagenet@30"
LONGEST_SECONDS = 200.0
OF_ITS_KIND = 1.3
ROOT = Path(__file__).resolve().parents[1]
PRUNERS = {
    "none": optuna.pruners.NopPruner,
    "median": lambda: optuna.pruners.MedianPruner(n_startup_trials=4),
    "halving": lambda: optuna.pruners.SuccessiveHalvingPruner(min_resource=1, reduction_factor=4),
    "hyperband": lambda: optuna.pruners.HyperbandPruner(min_resource=1, max_resource=20),
}


def plans(count: int) -> list[dict[str, Any]]:
    """Return sweeps on a quarter to three times the slots, every goal with every pruner, a loss in every third."""
    goals = [goal for goal in get_args(Goal) if goal != "deadline"]
    kinds = itertools.cycle(itertools.product((SLOTS // 4, SLOTS, 3 * SLOTS), PRUNERS))
    chosen = zip(kinds, itertools.cycle(goals), range(count), strict=False)
    return [
        {"n_jobs": jobs, "pruner": pruner, "goal": goal, "kills": number % 3 == 2}
        for (jobs, pruner), goal, number in chosen
    ]


def sweep(plan: dict[str, Any], seed: int) -> dict[str, Any]:
    """Run one sweep in a process of its own."""
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    study = optuna.create_study(direction="maximize", pruner=PRUNERS[plan["pruner"]]())
    for row in range(TRIALS):
        study.enqueue_trial({"configuration": row})
    killed: list[int] = []
    over = threading.Event()
    if plan["kills"]:
        threading.Thread(target=_kill_one, args=(random.Random(seed), killed, over), daemon=True).start()
    began = time.monotonic()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        optimize(
            study,
            trains,
            n_trials=TRIALS,
            n_jobs=plan["n_jobs"],
            emulate=EMULATED,
            terms=StudyTerms(goal=plan["goal"]),
            state_dir=folder,
        )
        seconds = time.monotonic() - began
    over.set()
    states = [trial.state.name for trial in study.trials]
    return {"seconds": seconds, "killed": len(killed), "states": {name: states.count(name) for name in set(states)}}


def _kill_one(chance: random.Random, killed: list[int], over: threading.Event) -> None:
    """A replica that runs, at some moment."""
    over.wait(chance.uniform(4.0, 10.0))
    while not killed and not over.wait(0.2):
        running = [
            process
            for process in psutil.Process().children(recursive=True)
            if "trials.launch.fork.server" in " ".join(_words(process)) and os.getsid(process.pid) == process.pid
        ]
        if len(running) > 3:
            victim = chance.choice(running[2:])
            victim.send_signal(signal.SIGKILL)
            killed.append(victim.pid)


def _words(process: psutil.Process) -> list[str]:
    try:
        return list(process.cmdline())
    except psutil.Error:
        return []


def measure() -> list[Measurement]:
    found = []
    for seed, plan in enumerate(plans(int(os.environ.get("ELASTUNE_SWEEPS", SWEEPS)))):
        words = [sys.executable, "-m", "benchmarks.sweeps_in_a_row", json.dumps(plan), str(seed)]
        environ = {**os.environ, "SWEEP_SEED": str(seed % 5), "OMP_NUM_THREADS": "1"}
        # One that does not end ends this with an error.
        done = subprocess.run(
            words, cwd=ROOT, env=environ, capture_output=True, text=True, check=True, timeout=LONGEST_SECONDS
        )
        found.append({**plan, **json.loads(done.stdout.splitlines()[-1])})
        print(f"  {json.dumps(found[-1])}", flush=True)
        if sum(found[-1]["states"].get(name, 0) for name in ("COMPLETE", "PRUNED")) != TRIALS:
            raise RuntimeError(f"trials are missing, or failed: {found[-1]}")
    kinds = {(each["n_jobs"], each["pruner"]) for each in found}
    worst = 0.0
    for kind in kinds:
        seconds = [each["seconds"] for each in found if (each["n_jobs"], each["pruner"]) == kind]
        worst = max(worst, max(seconds) / statistics.median(seconds))
    return [
        Measurement(
            what=f"{len(found)} sweeps in a row, all ended: the longest against the median of its kind",
            ours=worst,
            peer=1.0,
            unit="times",
            peer_name="the median of its kind",
            target=OF_ITS_KIND,
            details={"sweeps": found},
        )
    ]


if __name__ == "__main__":
    print(json.dumps(sweep(json.loads(sys.argv[1]), int(sys.argv[2]))))
