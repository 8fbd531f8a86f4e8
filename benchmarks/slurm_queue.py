"""Under Slurm: how soon a replica speaks, a whole sweep, and what its controller has to bear.

Needs a Slurm of one's own with two nodes of four GPUs, which SLURM_CONF names, and ELASTUNE_TEST_SLURM set to show
that its jobs may be ended; without it there are no rows. With
ELASTUNE_SUBMITIT, a folder that holds the package submitit, the same sweep runs as an array of jobs, a job a trial.
"""

from __future__ import annotations

import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import ExitStack, closing
from pathlib import Path

import optuna

from benchmarks.emulated_trial import BATCH, CONFIGURATIONS, STEPS, curves, trains
from benchmarks.frame import Measurement
from dist_core.goodput import optim_seconds
from dist_core.goodput.speed_profiles import speed_profile
from scheduler.client.connection import of_folder
from tests.support.slurm import Up, allocation, slurm, tidy, up
from tests.support.waiting import until
from tuner_bridge import optimize

LAUNCHES = 25
FIRST_LINE = 0.150
SLOTS, KEEP_ONE_IN, MOST_SLOTS = 8, 4, 8
PROFILE = "resnet50-imagenet@14"
"""Profile with which a whole trial takes 20 s on one slot, and one that is stopped at its first report 1 s."""
SWEEPS = 3
"""Sweeps to take the median of: which trials are stopped depends on who reports first."""
REPLICAS, CALLS = 200, 40
ROOT = Path(__file__).resolve().parent.parent
SAYS = "import os, time\ndef run():\n    print(time.time(), flush=True)\n"
SLEEPS = "import time\ndef run():\n    time.sleep(600)\n"


def spec(folder: Path, number: int, study: str) -> dict[str, object]:
    return {
        "study": study,
        "number": number,
        "entrypoint": "code_of_it:run",
        "driven": False,
        "working_dir": str(folder),
        "python_path": [str(folder)],
    }


def first_lines(scheduler: Up) -> float:
    """Median seconds from the submission of a trial to its first line, the fork server warm."""
    folder = scheduler.folder
    (folder / "code_of_it.py").write_text(SAYS)
    took = []
    with closing(of_folder(scheduler.state)) as client:
        for number in range(LAUNCHES):
            began = time.time()
            trial = client.request("POST", "/trials", spec(folder, number, "first lines"))["trial_id"]

            def printed(trial: str = trial) -> float | None:
                words = [path.read_text() for path in (scheduler.state / "logs" / trial).glob("*.log")]
                return float(words[0]) if words and words[0].endswith("\n") else None

            took.append(until(printed, 30.0, "it said nothing") - began)
            # As a trial of a sweep would come: when the one before is over.
            time.sleep(0.3)
    return statistics.median(took[3:])


def own_jobs(folder: Path) -> float:
    """The same of a job of its own for each."""
    took = []
    for number in range(5):
        file = folder / f"job-{number}.txt"
        began = time.time()
        slurm(
            *("sbatch", "--gpus=1", "--job-name=elastune-test", f"--output={file}"),
            f"--wrap={sys.executable} -c 'import time; print(time.time(), flush=True)'",
        )

        def printed(file: Path = file) -> bool:
            return file.exists() and file.read_text().endswith("\n")

        until(printed, 30.0, "no job ran")
        took.append(float(file.read_text()) - began)
        time.sleep(1.0)
    return statistics.median(took)


def sweep(scheduler: Up) -> float:
    """Seconds of successive halving over all configurations."""
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    pruner = optuna.pruners.SuccessiveHalvingPruner(min_resource=1, reduction_factor=KEEP_ONE_IN)
    study = optuna.create_study(direction="maximize", pruner=pruner)
    for row in range(CONFIGURATIONS):
        study.enqueue_trial({"configuration": row})
    server = json.loads((scheduler.state / "server.json").read_text())
    before = dict(os.environ)
    os.environ.update(ELASTUNE_URL=server["url"], ELASTUNE_TOKEN=(scheduler.state / "token").read_text().strip())
    began = time.time()
    try:
        optimize(study, trains, n_trials=CONFIGURATIONS, n_jobs=SLOTS, max_replicas=MOST_SLOTS)
    finally:
        os.environ.clear()
        os.environ.update(before)
    assert all(trial.state.is_finished() for trial in study.trials)
    return time.time() - began


def array_of_jobs(folder: Path) -> float:
    described = {
        "values": curves().tolist(),
        "epoch_seconds": STEPS * float(optim_seconds(speed_profile(PROFILE).params, 1, 1, BATCH)),
        "keep_one_in": KEEP_ONE_IN,
    }
    (folder / "sweep.json").write_text(json.dumps(described))
    environ = {**os.environ, "PYTHONPATH": f"{os.environ['ELASTUNE_SUBMITIT']}:{ROOT}", "PYTHONWARNINGS": "ignore"}
    script = ROOT / "benchmarks" / "peers" / "submitit_array.py"
    done = subprocess.run(
        [sys.executable, str(script), str(folder), str(SLOTS)], env=environ, capture_output=True, text=True, check=True
    )
    return float(json.loads(done.stdout.splitlines()[-1])["makespan"])


def remote_calls() -> dict[str, int]:
    """Return the users' calls to the controller so far, by kind, without its own nodes' and without this one."""
    told = slurm("sdiag").partition("by message type")[2].partition("by user")[0]
    found = {name: int(count) for name, count in re.findall(r"(\w+)\s+\(\s*\d+\) count:(\d+)", told)}
    of_nodes = ("MESSAGE_", "REQUEST_COMPLETE_", "REQUEST_STEP_COMPLETE", "REQUEST_STATS_INFO", "RESPONSE_")
    return {name: count for name, count in found.items() if not name.startswith(of_nodes)}


def load(folder: Path) -> tuple[int, dict[str, int]]:
    """Remote calls while so many replicas start, and run for a minute."""
    (folder / "code_of_it.py").write_text(SLEEPS)
    line = f"partition=main gpus=4 slots=0:{REPLICAS} idle=5"
    with (
        up(folder, "--slurm", line, "--slots-per-gpu", str(REPLICAS // SLOTS), "--preload", "numpy") as scheduler,
        closing(of_folder(scheduler.state)) as client,
    ):
        before = remote_calls()
        began = time.monotonic()
        for number in range(REPLICAS):
            client.request("POST", "/trials", spec(folder, number, "load"))
        until(
            lambda: sum(row["used"] for row in client.request("GET", "/rows/nodes")) == REPLICAS,
            120.0,
            "not all replicas run",
        )
        running_after = time.monotonic() - began
        time.sleep(max(0.0, 60.0 - running_after))
        after = remote_calls()
    asked = {name: count - before.get(name, 0) for name, count in after.items() if count > before.get(name, 0)}
    return sum(asked.values()), {**asked, "seconds until all ran": round(running_after)}


def measure() -> list[Measurement]:
    if not os.environ.get("SLURM_CONF") or not os.environ.get("ELASTUNE_TEST_SLURM"):
        return []
    os.environ["OMP_NUM_THREADS"] = "1"
    rows = []
    with tempfile.TemporaryDirectory() as scratch, ExitStack() as stack:
        folders = {name: Path(scratch) / name for name in ("inside", "machine", "jobs", "array", "load")}
        for folder in folders.values():
            folder.mkdir()
        tidy()
        job: Mapping[str, str] = stack.enter_context(allocation())
        inside, machine = [], []
        with up(folders["inside"], "--emulate", PROFILE, environ=job) as scheduler:
            inside_line = first_lines(scheduler)
        with up(folders["machine"], "--emulate", f"2x4:{PROFILE}") as scheduler:
            machine_line = first_lines(scheduler)
        for _ in range(SWEEPS):
            with up(folders["inside"], "--emulate", PROFILE, environ=job) as scheduler:
                inside.append(sweep(scheduler))
            with up(folders["machine"], "--emulate", f"2x4:{PROFILE}") as scheduler:
                machine.append(sweep(scheduler))
        stack.close()
        tidy()
        jobs_line = own_jobs(folders["jobs"])
        rows += [
            Measurement(
                what="first line of a replica inside an allocation, warm",
                ours=inside_line * 1000.0,
                peer=FIRST_LINE * 1000.0,
                unit="ms",
                peer_name="the longest it may take",
                target=1.0,
                details={"on one machine": machine_line * 1000.0},
            ),
            Measurement(
                what="first line of a replica inside an allocation, warm",
                ours=inside_line,
                peer=jobs_line,
                unit="s",
                peer_name="a job of its own",
                target=1.0,
            ),
            Measurement(
                what="sweep of 64 emulated trials on 2 x 4 slots",
                ours=statistics.median(inside),
                peer=statistics.median(machine),
                unit="s",
                peer_name="the same on one machine",
                target=1.05,
                details={"inside": inside, "machine": machine},
            ),
        ]
        if os.environ.get("ELASTUNE_SUBMITIT"):
            rows.append(
                Measurement(
                    what="sweep of 64 emulated trials on 2 x 4 slots",
                    ours=statistics.median(inside),
                    peer=array_of_jobs(folders["array"]),
                    unit="s",
                    peer_name="submitit, an array of jobs",
                    target=0.5,
                )
            )
            tidy()
        calls, details = load(folders["load"])
        rows.append(
            Measurement(
                what=f"remote calls of {REPLICAS} replicas in a minute",
                ours=float(calls),
                peer=float(CALLS),
                unit="calls",
                peer_name="the most it may be",
                target=1.0,
                details=details,
            )
        )
    tidy()
    return rows
