"""Two people share one scheduler: each starts a study, and the second one is in a hurry.

    elastune up --slots 2                       # in a terminal of its own; it prints what to export
    python examples/two_studies.py patient &    # two lines in two other terminals
    python examples/two_studies.py hurried

``python examples/two_studies.py`` does all three by itself, and draws who had which slots when: two-studies.png.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import optuna
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset

from dist_core import AdaptiveDataLoader, AdaptiveDataParallel, remaining_epochs_until
from tuner_bridge import StudyTerms, optimize

TERMS = {"patient": StudyTerms(weight=1.0), "hurried": StudyTerms(weight=1.0, priority=1, goal="time_to_best")}
TRIALS = int(os.environ.get("TRIALS", "4"))


def objective(trial: optuna.Trial) -> float:
    torch.manual_seed(0)
    digits, answers = (torch.as_tensor(each) for each in load_digits(return_X_y=True))
    digits = digits.float() / 16
    width = trial.suggest_int("width", 32, 256, log=True)
    net = nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 10))
    optimizer = torch.optim.Adam(net.parameters(), lr=trial.suggest_float("lr", 1e-4, 3e-2, log=True))
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


def sweep(name: str) -> None:
    study = optuna.create_study(study_name=name, direction="maximize", sampler=optuna.samplers.TPESampler(seed=1))
    began = time.monotonic()
    optimize(study, objective, n_trials=TRIALS, n_jobs=2, terms=TERMS[name])
    print(f"{name}: best: accuracy {study.best_value:.3f} after {time.monotonic() - began:.0f} s", flush=True)


def both() -> None:
    elastune = [sys.executable, "-m", "scheduler.cli"]
    with tempfile.TemporaryDirectory() as folder:
        up = subprocess.Popen(
            [*elastune, "up", "--slots", "2", "--port", "0", "--state-dir", folder],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            server = Path(folder) / "server.json"
            while not server.exists() and up.poll() is None:
                time.sleep(0.1)
            url, token = json.loads(server.read_text())["url"], (Path(folder) / "token").read_text().strip()
            environ = {**os.environ, "ELASTUNE_URL": url, "ELASTUNE_TOKEN": token}
            patient = subprocess.Popen([sys.executable, __file__, "patient"], env=environ)
            time.sleep(4)
            subprocess.run([sys.executable, __file__, "hurried"], env=environ, check=True)
            patient.wait()
            subprocess.run([*elastune, "timeline", "two-studies"], env=environ, check=True, stdout=subprocess.DEVNULL)
        finally:
            up.terminate()
            up.wait()


if __name__ == "__main__":
    if len(sys.argv) > 1:
        sweep(sys.argv[1])
    else:
        both()
