"""A sweep whose whole machine loses its power, and the same line once more: it goes on with what it had.

    python examples/power_cut.py

It starts the sweep of ``sweep()`` in a process of its own, kills that with all that it has started, and runs it again.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from pathlib import Path

import optuna
import psutil
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset

from dist_core import AdaptiveDataLoader, AdaptiveDataParallel, remaining_epochs_until
from tuner_bridge import optimize

TRIALS = 5


def objective(trial: optuna.Trial) -> float:
    torch.manual_seed(0)
    digits, answers = (torch.as_tensor(each) for each in load_digits(return_X_y=True))
    digits = digits.float() / 16
    net = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))
    optimizer = torch.optim.Adam(net.parameters(), lr=trial.suggest_float("lr", 1e-4, 1e-2, log=True))
    loader = AdaptiveDataLoader(TensorDataset(digits[:1500], answers[:1500]), batch_size=30, shuffle=True)
    model = AdaptiveDataParallel(net, optimizer)
    accuracy = 0.0
    for epoch in remaining_epochs_until(8):
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
        with torch.no_grad():
            accuracy = float((net(digits[1500:]).argmax(1) == answers[1500:]).float().mean())
        trial.report(accuracy, epoch)
    return accuracy


def sweep(folder: Path) -> None:
    study = optuna.create_study(
        study_name="digits",
        storage=f"sqlite:///{folder}/sweep.db",
        load_if_exists=True,
        direction="maximize",
        sampler=optuna.samplers.RandomSampler(seed=0),
    )
    optimize(study, objective, n_trials=TRIALS, n_jobs=2, slots=2, state_dir=folder / "state", resume=True)
    print(f"{len(study.trials)} trials, best: accuracy {study.best_value:.3f}", flush=True)


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, folder]
        first = subprocess.Popen(command)
        deadline = time.monotonic() + 180
        while _reports(Path(folder)) < 12 and time.monotonic() < deadline:
            time.sleep(0.1)
        everything = [*psutil.Process(first.pid).children(recursive=True), psutil.Process(first.pid)]
        for process in everything:
            process.kill()
        first.wait()
        print(f"killed {len(everything)} processes, with {_reports(Path(folder))} reports in the study", flush=True)
        subprocess.run(command, check=True)


def _reports(folder: Path) -> int:
    if not (folder / "sweep.db").exists():
        return 0
    try:
        [study] = optuna.get_all_study_names(f"sqlite:///{folder}/sweep.db")
        loaded = optuna.load_study(study_name=study, storage=f"sqlite:///{folder}/sweep.db")
        return sum(len(trial.intermediate_values) for trial in loaded.trials)
    except Exception:
        # It is being made.
        return 0


if __name__ == "__main__":
    if len(sys.argv) > 1:
        sweep(Path(sys.argv[1]))
    else:
        main()
