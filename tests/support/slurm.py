"""A real Slurm: its commands, allocations to run in, and schedulers that use it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TypeVar

import psutil

from scheduler.client import Client
from scheduler.client.connection import of_folder
from tests.support.project import ROOT
from tests.support.waiting import until

Found = TypeVar("Found")
TRAINS = """
import os, sys, time
import torch
from dist_core import AdaptiveDataLoader, AdaptiveDataParallel, remaining_epochs_until

torch.manual_seed(0)
x = torch.randn(2048, 8)
net = torch.nn.Linear(8, 2)
optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
loader = AdaptiveDataLoader(torch.utils.data.TensorDataset(x, (x.sum(1) > 0).long()), batch_size=64, shuffle=True)
model = AdaptiveDataParallel(net, optimizer)
print("starts on", os.environ["ELASTUNE_NODE"], os.environ["SLURM_JOB_ID"], flush=True)
for epoch in remaining_epochs_until(int(sys.argv[1])):
    print("epoch", epoch, flush=True)
    for inputs, targets in loader:
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
        time.sleep(0.02)
"""


def slurm(*words: str, environ: Mapping[str, str] | None = None) -> str:
    done = subprocess.run(words, capture_output=True, text=True, check=False, env={**os.environ, **(environ or {})})
    assert done.returncode == 0, f"{words}: {done.stderr}"
    return done.stdout.strip()


def jobs(*, state: str = "") -> list[str]:
    """Ids of all jobs in the queue."""
    return slurm("squeue", "--noheader", "--array", "--format=%i", *([f"--states={state}"] if state else [])).split()


def agents() -> list[int]:
    """Processes of agents on this machine, which plays all nodes."""
    found = []
    for process in psutil.process_iter(["cmdline", "name"]):
        words = process.info["cmdline"] or []
        if "trials.agents.start" in words and process.info["name"] != "srun":
            found.append(process.pid)
    return found


TEST_NAME = "elastune-test"
"""Of jobs that tests submit themselves."""


def tidy() -> None:
    """Every job of tests and of their schedulers ended, every node there."""
    ours = slurm("squeue", "--noheader", "--array", "--format=%i|%j")
    for job, _, name in (line.partition("|") for line in ours.splitlines()):
        if name.startswith("elastune"):
            subprocess.run(["scancel", job], check=False, capture_output=True)
    until(lambda: not jobs(), 60.0, "jobs do not end")
    if "down" in slurm("sinfo", "-h", "-o", "%T"):
        slurm("scontrol", "update", "nodename=ALL", "state=resume")
    until(lambda: not agents(), 60.0, "agents are left")


@contextlib.contextmanager
def allocation(*options: str, nodes: int = 2, gpus: int = 4) -> Iterator[dict[str, str]]:
    """Variables of a job with nodes of its own, as in a shell of `salloc`."""
    words = [
        "sbatch",
        "--parsable",
        f"--nodes={nodes}",
        f"--gpus-per-node={gpus}",
        f"--job-name={TEST_NAME}",
        "--output=/dev/null",
        *options,
    ]
    job = slurm(*words, "--wrap=sleep 3600")
    try:
        listed = until(
            lambda: slurm("squeue", "--noheader", f"--jobs={job}", "--states=R", "--format=%N"),
            60.0,
            "it does not begin",
        )
        yield {"SLURM_JOB_ID": job, "SLURM_JOB_NODELIST": listed, "SLURM_JOB_PARTITION": "main"}
    finally:
        subprocess.run(["scancel", job], check=False, capture_output=True)


class Up:
    """`elastune up` in a process of its own, in ``folder``."""

    def __init__(self, folder: Path, *options: str, environ: Mapping[str, str] | None = None) -> None:
        self.folder = folder
        self.state = folder / "state"
        self.options = options
        self.environ = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **(environ or {})}
        self.output = folder / "up.txt"
        (folder / "trains.py").write_text(TRAINS)
        self.process = self._start()

    def _start(self) -> subprocess.Popen[bytes]:
        words = [sys.executable, "-m", "scheduler.cli", "up", "--port", "0", "--state-dir", str(self.state)]
        with open(self.output, "ab") as output:
            began = output.tell()
            process = subprocess.Popen(
                [*words, *self.options], stdout=output, stderr=output, env=self.environ, cwd=self.folder
            )

        def listens() -> bool:
            with open(self.output, "rb") as file:
                file.seek(began)
                said = file.read()
            return b"Ctrl-C stops" in said or process.poll() is not None

        until(listens, 60.0, "the scheduler does not answer")
        assert process.poll() is None, self.said
        return process

    @property
    def said(self) -> str:
        return self.output.read_text()

    def run(self, *words: str) -> str:
        """A command of ours, as a user types it."""
        done = subprocess.run(
            [sys.executable, "-m", "scheduler.cli", *words, "--state-dir", str(self.state)],
            capture_output=True,
            text=True,
            check=False,
            env=self.environ,
            cwd=self.folder,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def submit(self, replicas: str, epochs: int) -> str:
        """Id of a trial that trains."""
        said = subprocess.run(
            [
                *(sys.executable, "-m", "scheduler.cli", "submit", "--state-dir", str(self.state)),
                *("--replicas", replicas, "--", "python", "trains.py", str(epochs)),
            ],
            capture_output=True,
            text=True,
            check=True,
            env=self.environ,
            cwd=self.folder,
        ).stdout
        return said.strip().rpartition("(")[2].rstrip(")")

    @contextlib.contextmanager
    def client(self) -> Iterator[Client]:
        connection = of_folder(self.state)
        try:
            yield Client(connection)
        finally:
            connection.close()

    def state_of(self, trial: str) -> str:
        with self.client() as client:
            return client.trial(trial).state

    def why(self, trial: str) -> str:
        with self.client() as client:
            return client.trial(trial).why

    def slots_of(self, trial: str) -> int:
        with self.client() as client:
            return client.trial(trial).slots

    def until_state(self, trial: str, state: str, seconds: float = 60.0) -> None:
        until(lambda: self.state_of(trial) == state, seconds, f"{trial} is {self.state_of(trial)}, not {state}")

    def starts(self, trial: str) -> list[str]:
        """What each replica said first, in its log."""
        logs = sorted((self.state / "logs" / trial).glob("*.log"))
        return [line for log in logs for line in log.read_text().splitlines() if line.startswith("starts on")]

    def epochs(self, trial: str) -> list[int]:
        """Those that any replica has begun."""
        logs = (self.state / "logs" / trial).glob("*.log")
        lines = [line for log in logs for line in log.read_text().splitlines() if line.startswith("epoch")]
        return [int(line.split()[1]) for line in lines]

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def start_again(self) -> None:
        self.process = self._start()

    def stop(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            self.process.wait(90.0)


@contextlib.contextmanager
def up(folder: Path, *options: str, environ: Mapping[str, str] | None = None) -> Iterator[Up]:
    scheduler = Up(folder, *options, environ=environ)
    try:
        yield scheduler
    finally:
        scheduler.stop()
