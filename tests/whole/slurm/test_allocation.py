"""Inside a job of several nodes: its slots are used, whatever happens to scheduler, agents, nodes or the job."""

from __future__ import annotations

import ast
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

from tests.support.project import ROOT
from tests.support.slurm import agents, allocation, jobs, slurm, up
from tests.support.waiting import until
from trials.agents.start import KEPT_OF_QUEUE

SWEEP = """
import os, time, optuna
from tuner_bridge import optimize

def objective(trial):
    x = trial.suggest_float("x", 0, 1)
    print("on", os.environ["ELASTUNE_NODE"], os.environ["CUDA_VISIBLE_DEVICES"], sorted(
        name for name in os.environ if name.startswith("SLURM")), flush=True)
    time.sleep(0.5)
    return x

if __name__ == "__main__":
    study = optuna.create_study()
    optimize(study, objective, n_trials=24, n_jobs=-1, state_dir="state")
    print("values", len([trial for trial in study.trials if trial.state.name == "COMPLETE"]))
"""


def submitted(folder: Path, *options: str, command: str) -> str:
    """A batch job that runs a command in the folder."""
    environ = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    script = folder / "job.sh"
    script.write_text(f"#!/bin/bash\ncd {folder}\n{command}\n")
    words = [
        "sbatch",
        "--parsable",
        "--nodes=2",
        "--gpus-per-node=4",
        "--job-name=elastune-test",
        f"--output={folder}/out.txt",
        *options,
    ]
    return slurm(*words, str(script), environ=environ)


def test_a_sweep_in_a_job_of_two_nodes_uses_all_of_its_slots_and_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "tune.py").write_text(SWEEP)
    job = submitted(tmp_path, command=f"{sys.executable} tune.py")
    until(lambda: job not in jobs(), 90.0, "the job does not end")
    assert "values 24" in (tmp_path / "out.txt").read_text()
    lines = [path.read_text().split(maxsplit=3) for path in (tmp_path / "state" / "logs").glob("*/*.log")]
    assert {(node, device) for _, node, device, _ in lines} == {(f"n{n}", str(g)) for n in (1, 2) for g in range(4)}
    names = {name for *_, rest in lines for name in ast.literal_eval(rest.splitlines()[0])}
    assert {"SLURM_JOB_ID", "SLURM_JOB_PARTITION"} <= names <= set(KEPT_OF_QUEUE)
    assert agents() == []


CONTAINS = """#!/bin/bash
# What pyxis does for srun, as far as it shows: it takes the options, and what runs finds the image's own files.
words=()
for word in "$@"; do
    case "$word" in
        --container*) echo "$word" >> {folder}/images ;;
        *) words+=("$word") ;;
    esac
done
PATH={image}:$PATH exec {srun} "${{words[@]}}"
"""


def test_agents_of_a_job_run_in_containers_that_have_a_python_of_their_own(tmp_path: Path) -> None:
    image, wrapper = tmp_path / "image", tmp_path / "bin"
    for folder in (image, wrapper):
        folder.mkdir()
    (image / "python3").write_text(f'#!/bin/bash\necho started >> {tmp_path}/contained\nexec {sys.executable} "$@"\n')
    (wrapper / "srun").write_text(CONTAINS.format(folder=tmp_path, image=image, srun=shutil.which("srun")))
    for script in (image / "python3", wrapper / "srun"):
        script.chmod(0o755)
    (tmp_path / "tune.py").write_text(SWEEP)
    contained = "ELASTUNE_CONTAINER='--container-image=img.sqsh --container-mounts=/data:/data'"
    job = submitted(tmp_path, command=f"PATH={wrapper}:$PATH {contained} {sys.executable} tune.py")
    until(lambda: job not in jobs(), 120.0, "the job does not end")
    assert "values 24" in (tmp_path / "out.txt").read_text(), (tmp_path / "out.txt").read_text()
    assert (tmp_path / "images").read_text().split() == [
        "--container-image=img.sqsh",
        "--container-mounts=/data:/data",
    ] * 2
    assert (tmp_path / "contained").read_text().count("started") == 2
    lines = [path.read_text().split(maxsplit=3) for path in (tmp_path / "state" / "logs").glob("*/*.log")]
    assert {node for _, node, _, _ in lines} == {"n1", "n2"}
    assert agents() == []


def test_replicas_outlive_their_scheduler_and_the_next_one_has_them(tmp_path: Path) -> None:
    """Two jobs start one after the other, and training has to outlast the first."""
    with allocation() as job, up(tmp_path, environ=job) as scheduler:
        trial = scheduler.submit("5:5", 12)
        scheduler.until_state(trial, "running")
        until(lambda: len(scheduler.epochs(trial)) > 3, 30.0, "it does not train")
        scheduler.kill()
        before = set(agents())
        scheduler.start_again()
        scheduler.until_state(trial, "succeeded", 90.0)
        assert set(agents()) == before
        starts = scheduler.starts(trial)
        assert len(starts) == 5
        assert {line.split()[2] for line in starts} == {"n1", "n2"}
        assert set(scheduler.epochs(trial)) == set(range(12))
    assert until(lambda: not agents(), 10.0, "agents are left")


def test_an_agent_that_is_killed_is_started_again_and_its_trial_goes_on(tmp_path: Path) -> None:
    with allocation() as job, up(tmp_path, environ=job) as scheduler:
        trial = scheduler.submit("1:1", 400)
        scheduler.until_state(trial, "running")
        with scheduler.client() as client:
            node = next(row.name for row in client.nodes() if row.used)
        before = set(agents())
        for pid in before:
            with open(f"/proc/{pid}/environ") as environ:
                if f"SLURMD_NODENAME={node}\0" in environ.read():
                    os.kill(pid, signal.SIGKILL)
        until(lambda: len(scheduler.starts(trial)) == 2, 40.0, "it does not go on")
        until(lambda: len(set(agents()) - before) == 1, 20.0, "no agent is started again")
        assert "was lost" in scheduler.run("show", trial) or "lost" in scheduler.run("why", trial)


def test_a_node_that_dies_costs_its_replicas_and_nobody_else(tmp_path: Path) -> None:
    """Its silence is waited for before it is believed dead."""
    cluster = os.environ["ELASTUNE_TEST_SLURM"]
    with allocation("--no-kill") as job, up(tmp_path, environ=job) as scheduler:
        trial = scheduler.submit("1:8", 10_000)
        spread = scheduler.submit("5:5", 10_000)
        scheduler.until_state(spread, "running")
        scheduler.until_state(trial, "running")
        try:
            subprocess.run([cluster, "stop-node", "2"], check=True, capture_output=True)
            until(lambda: scheduler.state_of(spread) == "paused", 60.0, "the loss is not seen")
            until(lambda: "needs 5 slots" in scheduler.why(spread), 30.0, "it is not told what it lacks")
            until(lambda: scheduler.state_of(trial) == "running", 60.0, "the other does not go on")
            with scheduler.client() as client:
                assert {row.name for row in client.nodes() if row.used} == {"n1"}
        finally:
            subprocess.run([cluster, "start-node", "2"], check=True, capture_output=True)
            until(lambda: "down" not in slurm("sinfo", "-h", "-N", "-o", "%T"), 60.0, "the node does not come back")


def test_a_job_that_is_cancelled_ends_with_everything_in_it(tmp_path: Path) -> None:
    words = f"exec {sys.executable} -m scheduler.cli up --port 0 --state-dir state"
    job = submitted(tmp_path, command=words)
    output = tmp_path / "out.txt"
    until(lambda: output.exists() and "Ctrl-C stops" in output.read_text(), 30.0, "no scheduler comes up")
    assert len(agents()) == 2
    slurm("scancel", job)
    until(lambda: not jobs() and not agents(), 40.0, "something is left")
    said = (tmp_path / "out.txt").read_text()
    assert "job " in said and "2 nodes, n1, n2" in said
    assert "Traceback" not in said


def test_one_node_alone_needs_no_agents_and_no_slurm_leaves_the_others_out(tmp_path: Path) -> None:
    with allocation(nodes=1, gpus=2) as job:
        alone = {**job, "SLURMD_NODENAME": job["SLURM_JOB_NODELIST"], "SLURM_JOB_GPUS": "0,1"}
        with up(tmp_path, environ={**alone, "CUDA_VISIBLE_DEVICES": "0,1"}) as scheduler:
            assert "localhost  -        0/2" in scheduler.run("nodes")
    with allocation() as job, up(tmp_path, "--no-slurm", "--slots", "1", environ=job) as scheduler:
        assert "localhost" in scheduler.run("nodes")
        assert agents() == []
