"""Sixteen trials at once on sixteen emulated slots, whose objective imports its libraries within itself.

Measured are the seconds until the last of the sixteen has made its first step, and the processor time that a replica of
the following trials has taken until then: they find the packages in memory that the first ones turned out to import.
The limits are those of two cores; importing torch alone takes a process 3 s there.
"""

from __future__ import annotations

import importlib
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
from tuner_bridge import optimize

SLOTS, LATER = 16, 8
EMULATED = "4x4:resnet50-imagenet@3.5"
MOST_SECONDS, MOST_CPU_SECONDS = 10.0, 0.5
ROOT = Path(__file__).resolve().parents[1]


def with_torch(trial: optuna.Trial) -> float:
    import torch  # noqa: F401

    return trains(trial)


def with_transformers(trial: optuna.Trial) -> float:
    import transformers  # noqa: F401

    return trains(trial)


def with_lightning(trial: optuna.Trial) -> float:
    import lightning  # noqa: F401

    return trains(trial)


def with_a_helper(trial: optuna.Trial) -> float:
    """Import behind other lines: what that brings is known once the first replica trains."""
    importlib.import_module("transformers")
    return trains(trial)


OBJECTIVES = {
    "torch": with_torch,
    "transformers": with_transformers,
    "lightning": with_lightning,
    "transformers in a helper": with_a_helper,
}


def trains(trial: optuna.Trial) -> float:
    import torch
    from torch.utils.data import TensorDataset

    from dist_core import AdaptiveDataLoader, AdaptiveDataParallel, remaining_epochs_until

    weight = trial.suggest_float("weight", 0.0, 1.0)
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    loader = AdaptiveDataLoader(TensorDataset(torch.zeros(320, 1)), batch_size=32)
    wrapped = AdaptiveDataParallel(model, optimizer)
    told = False
    for _ in remaining_epochs_until(3):
        for (x,) in loader:
            optimizer.zero_grad()
            wrapped(x).mean().backward()
            optimizer.step()
            if not told:
                told = True
                row = {"at": time.time(), "cpu": time.process_time()}
                (Path(os.environ["LATE_FOLDER"]) / str(trial.number)).write_text(json.dumps(row))
    return weight


def sweep(name: str) -> dict[str, Any]:
    """Run the sweep, in a process of its own that has imported none of the libraries."""
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        os.environ["LATE_FOLDER"] = folder
        began = time.time()
        optimize(
            optuna.create_study(),
            OBJECTIVES[name],
            n_trials=SLOTS + LATER,
            n_jobs=SLOTS,
            max_replicas=1,
            emulate=EMULATED,
            state_dir=Path(folder) / "state",
        )
        rows = [json.loads((Path(folder) / str(number)).read_text()) for number in range(SLOTS + LATER)]
    return {
        "first_steps": sorted(row["at"] - began for row in rows[:SLOTS]),
        "later_cpu": [row["cpu"] for row in rows[SLOTS:]],
    }


def measure() -> list[Measurement]:
    rows = []
    for library in OBJECTIVES:
        words = [sys.executable, "-m", "benchmarks.late_imports", library]
        environ = {**os.environ, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(words, cwd=ROOT, env=environ, capture_output=True, text=True, check=True)
        ran = json.loads(done.stdout.splitlines()[-1])
        rows += [
            Measurement(
                what=f"{SLOTS} trials that import {library} late: first step of all",
                ours=ran["first_steps"][-1],
                peer=MOST_SECONDS,
                unit="s",
                peer_name="the most it may take",
                target=1.0,
                details=ran,
            ),
            Measurement(
                what=f"CPU time of a later replica that imports {library} late, to its first step",
                ours=statistics.median(ran["later_cpu"]),
                peer=MOST_CPU_SECONDS,
                unit="s",
                peer_name="the most it may take",
                target=1.0,
                details=ran,
            ),
        ]
    return rows


if __name__ == "__main__":
    print(json.dumps(sweep(sys.argv[1])))
