"""Sixteen trials of one study that want the same data: seconds they spend on it, prepared once or by each for itself.

Two slots; making the data takes each process as long as its work does, and it is read by all. Beside it what the trials
hold of it in memory of their own: the files are mapped, of which a machine has one copy.
"""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import optuna

from benchmarks.frame import Measurement
from dist_core import prepared
from tuner_bridge import optimize

TRIALS, SLOTS, PARTS = 16, 2, 16
IMAGES, SIDE = 3200, 64


def images(part: Any) -> Any:
    """Some work for each image, as decoding and resizing are."""
    for number in part.of(IMAGES):
        generator = np.random.default_rng(number)
        spectrum = np.fft.fft2(generator.standard_normal((SIDE, SIDE, 3)), axes=(0, 1))
        smooth = np.fft.ifft2(spectrum / (1.0 + np.arange(SIDE))[:, None, None], axes=(0, 1)).real
        yield {"image": (smooth * 64 + 128).clip(0, 255).astype(np.uint8), "label": number % 10}


def together(trial: optuna.Trial) -> float:
    began = time.monotonic()
    data = prepared("images", images, parts=PARTS)
    trial.set_user_attr("seconds", time.monotonic() - began)
    before = _own_megabytes()
    total = sum(float(data[index]["image"].mean()) for index in range(len(data)))
    trial.set_user_attr("megabytes", _own_megabytes() - before)
    return total + trial.suggest_float("x", 0.0, 1.0)


def alone(trial: optuna.Trial) -> float:
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        data = prepared("images", images, parts=PARTS, folder=folder)
        trial.set_user_attr("seconds", time.monotonic() - began)
        total = sum(float(data[index]["image"].mean()) for index in range(len(data)))
    return total + trial.suggest_float("x", 0.0, 1.0)


def _own_megabytes() -> float:
    """This process's memory that is no file's."""
    status = Path("/proc/self/status").read_text()
    return float(next(line.split()[1] for line in status.splitlines() if line.startswith("RssAnon"))) / 1024


def _sweep(objective: Any) -> list[optuna.trial.FrozenTrial]:
    os.environ["OMP_NUM_THREADS"] = "1"
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    with tempfile.TemporaryDirectory() as folder:
        study = optuna.create_study()
        optimize(study, objective, n_trials=TRIALS, n_jobs=SLOTS, slots=SLOTS, state_dir=Path(folder))
        return list(study.trials)


def measure() -> list[Measurement]:
    shared, apart = _sweep(together), _sweep(alone)
    ours, peer = (sum(each.user_attrs["seconds"] for each in trials) for trials in (shared, apart))
    return [
        Measurement(
            what=f"seconds that {TRIALS} trials spend on their data, prepared once",
            ours=ours,
            peer=peer,
            unit="s",
            peer_name="each preparing its own",
            target=0.1,
            details={
                "own megabytes of each": [each.user_attrs["megabytes"] for each in shared],
                "megabytes of the data": IMAGES * SIDE * SIDE * 3 / 1e6,
            },
        )
    ]
