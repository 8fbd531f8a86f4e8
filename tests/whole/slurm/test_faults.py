"""A sweep in a pool under random faults: no trial is lost, none runs twice at a time, no job is left behind.

ELASTUNE_FAULTS sets how many (20 take about ten minutes), ELASTUNE_FAULT_SEED another order.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import random
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

from tests.support.project import ROOT
from tests.support.slurm import Up, agents, jobs, slurm, up
from tests.support.waiting import until

FAULTS = int(os.environ.get("ELASTUNE_FAULTS", "20"))
BETWEEN_SECONDS = 30.0
TRIALS_AT_A_TIME = 4

pytestmark = [
    pytest.mark.timeout(FAULTS * 2.0 * BETWEEN_SECONDS + 600.0),
]

SWEEP = """
import os, sys, time, optuna, torch
from dist_core import AdaptiveDataLoader, AdaptiveDataParallel, remaining_epochs_until, set_checkpoint_interval
from tuner_bridge import optimize

def objective(trial):
    x = trial.suggest_float("x", 0, 1)
    set_checkpoint_interval(0.5)
    data = torch.randn(512, 8)
    net = torch.nn.Linear(8, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    loader = AdaptiveDataLoader(torch.utils.data.TensorDataset(data, data.sum(1, keepdim=True)), batch_size=32)
    model = AdaptiveDataParallel(net, optimizer)
    for epoch in remaining_epochs_until(40):
        with open(os.environ["BEATS"], "a") as beats:
            beats.write(f"{trial.number} {os.getpid()} {time.time()} {epoch}\\n")
        for inputs, targets in loader:
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(model(inputs), targets).backward()
            optimizer.step()
            time.sleep(0.03)
    return x

if __name__ == "__main__":
    until = time.time() + float(sys.argv[1])
    study = optuna.create_study(study_name="under-faults", storage="sqlite:///study.db", load_if_exists=True)
    def enough(study, trial):
        if time.time() > until:
            study.stop()
    optimize(study, objective, n_jobs=4, max_replicas=1, callbacks=[enough], environ=["BEATS"])
    states = [trial.state.name for trial in study.trials]
    print("states", {name: states.count(name) for name in set(states)})
"""


class Vandal:
    """Does one of the things that happen to clusters; knows what it has done."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.done: Counter[str] = Counter()
        self.cluster = os.environ["ELASTUNE_TEST_SLURM"]
        self.home = Path(os.environ["SLURM_CONF"]).parent

    def strike(self) -> str:
        running = jobs(state="R")
        fault = self.random.choice(["node", "cancelled", "preempted", "controller", "time limit"])
        victim = self.random.choice(running) if running else ""
        if fault == "node":
            number = self.random.choice("12")
            subprocess.run([self.cluster, "stop-node", number], check=False, capture_output=True)
            time.sleep(self.random.uniform(1.0, 20.0))
            subprocess.run([self.cluster, "start-node", number], check=True, capture_output=True)
        elif fault == "controller":
            os.kill(int((self.home / "slurmctld.pid").read_text()), 9)
            time.sleep(self.random.uniform(1.0, 10.0))
            subprocess.run(["slurmctld"], check=True, capture_output=True)
        elif fault == "preempted":
            words = (
                "sbatch",
                "--partition=main",
                "--nodes=1",
                "--exclusive",
                "--job-name=elastune-test",
                "--output=/dev/null",
                "--wrap=sleep 5",
            )
            slurm(*words)
        elif victim and fault == "cancelled":
            subprocess.run(["scancel", victim], check=False)
        elif victim:
            subprocess.run(["scontrol", "update", f"jobid={victim}", "timelimit=1"], check=False, capture_output=True)
        else:
            return ""
        self.done[fault] += 1
        return fault


def test_nothing_is_lost_and_nothing_runs_twice_under_random_faults(tmp_path: Path) -> None:
    """A fault and its recovery take half a minute."""
    seed = int(os.environ.get("ELASTUNE_FAULT_SEED", "1"))
    vandal = Vandal(seed)
    (tmp_path / "sweep.py").write_text(SWEEP)
    beats = tmp_path / "beats"
    line = "partition=scavenge gpus=1 slots=0:4 idle=5 time=30 warn=40"
    with up(tmp_path, "--slurm", line) as scheduler, open(tmp_path / "sweep.txt", "w") as output:
        server = json.loads((scheduler.state / "server.json").read_text())
        environ = {
            **os.environ,
            "ELASTUNE_URL": server["url"],
            "ELASTUNE_TOKEN": (scheduler.state / "token").read_text().strip(),
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
            "BEATS": str(beats),
        }
        seconds = FAULTS * BETWEEN_SECONDS
        driver = subprocess.Popen(
            [sys.executable, "sweep.py", str(seconds)], cwd=tmp_path, env=environ, stdout=output, stderr=output
        )
        try:
            until(lambda: beats.exists(), 60.0, "nothing trains")
            began = time.monotonic()
            for number in range(FAULTS):
                vandal.strike()
                time.sleep(max(0.0, began + (number + 1) * BETWEEN_SECONDS - time.monotonic()))
            assert driver.wait(FAULTS * BETWEEN_SECONDS + 300.0) == 0, (tmp_path / "sweep.txt").read_text()
        finally:
            driver.kill()
            driver.wait()
        check_whole(scheduler, tmp_path, vandal)
    assert until(lambda: not jobs() and not agents(), 60.0, "something is left behind")


def check_whole(scheduler: Up, folder: Path, vandal: Vandal) -> None:
    said = (folder / "sweep.txt").read_text().splitlines()[-1]
    finished = json.loads(said.removeprefix("states ").replace("'", '"'))
    print(f"faults {dict(vandal.done)}, trials {finished}")
    assert sum(vandal.done.values()) >= FAULTS * 0.8
    assert set(finished) == {"COMPLETE"} and finished["COMPLETE"] >= FAULTS // 2, said
    beaten: dict[str, list[tuple[float, str, int]]] = {}
    for text in (folder / "beats").read_text().splitlines():
        trial, pid, at, epoch = text.split()
        beaten.setdefault(trial, []).append((float(at), pid, int(epoch)))
    for trial, beats in beaten.items():
        beats.sort()
        pids = [pid for _, pid, _ in beats]
        changes = sum(before != after for before, after in itertools.pairwise(pids))
        assert changes == len(set(pids)) - 1, f"two processes of trial {trial} ran at the same time"
        assert {epoch for _, _, epoch in beats} == set(range(40)), f"trial {trial} left epochs out"
    with contextlib.suppress(FileNotFoundError), scheduler.client() as client:
        assert {trial.state for trial in client.trials()} == {"succeeded"}
