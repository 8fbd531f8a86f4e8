"""A pool of jobs that comes and goes with what trials can use, and keeps what it has been told."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support.nine_shapes import EXPECTED, found_in_replicas
from tests.support.nni_experiment import NniExperiment
from tests.support.nni_scripts import REPORTS
from tests.support.project import ROOT
from tests.support.slurm import Up, agents, jobs, slurm, up
from tests.support.waiting import until

POOL = "partition=scavenge gpus=1 slots=0:6 idle=3"

SWEEP = """
import time, optuna
from tuner_bridge import optimize

def objective(trial):
    time.sleep(0.3)
    return trial.suggest_float("x", 0, 1)

if __name__ == "__main__":
    study = optuna.create_study(study_name="from-a-pool")
    optimize(study, objective, n_trials=12, n_jobs=4)
    print("values", len([trial for trial in study.trials if trial.state.name == "COMPLETE"]))
"""


def test_the_pool_grows_with_a_trial_and_is_given_back(tmp_path: Path) -> None:
    """Jobs start, are named anew after half a minute, and end; the queue is looked at every few seconds."""
    with up(tmp_path, "--slurm", POOL) as scheduler:
        assert jobs() == []
        trial = scheduler.submit("2:4", 60)
        scheduler.until_state(trial, "running")
        assert 2 <= len(jobs()) <= 6
        shown = scheduler.run("nodes")
        assert "in scavenge" in shown, "each node says which jobs it came with"
        names = slurm("squeue", "--noheader", "--format=%j").split()
        assert set(names) <= {"elastune-jobs", "elastune", "elastune-jobs-0"}
        until(lambda: "elastune-jobs-0" in slurm("squeue", "--noheader", "--format=%j"), 60.0, "no job says its trial")
        scheduler.until_state(trial, "succeeded", 120.0)
        until(lambda: not jobs(), 40.0, "jobs that nobody uses are not given back")
        assert set(scheduler.epochs(trial)) == set(range(60))


def test_a_sweep_of_somebody_who_joins_runs_in_the_pool(tmp_path: Path) -> None:
    """A job of the pool takes 10 s to start."""
    (tmp_path / "tune.py").write_text(SWEEP)
    with up(tmp_path, "--slurm", POOL) as scheduler:
        environ = {**os.environ, **joining(scheduler)}
        done = subprocess.run(
            [sys.executable, "tune.py"], cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=120
        )
        assert "values 12" in done.stdout, done.stderr
        shapes = tmp_path / "shapes"
        assert found_in_replicas(shapes, joining(scheduler)) == EXPECTED


def joining(scheduler: Up) -> dict[str, str]:
    """Variables of a driver whose sweep runs in the pool."""
    server = json.loads((scheduler.state / "server.json").read_text())
    token = (scheduler.state / "token").read_text().strip()
    return {"ELASTUNE_URL": server["url"], "ELASTUNE_TOKEN": token, "PYTHONPATH": str(ROOT)}


def assert_no_token_can_be_seen_by_others(scheduler: Up) -> None:
    (job,) = jobs(state="R")[:1]
    with open(f"/proc/{agents()[0]}/cmdline") as file:
        command = file.read()
    shown = slurm("scontrol", "show", "job", "-dd", job) + slurm("squeue", "--json") + command
    commands = subprocess.run(["ps", "axww", "-o", "args"], capture_output=True, text=True, check=True).stdout
    kept = json.loads((scheduler.state / "tokens.json").read_text())
    owner = (scheduler.state / "token").read_text().strip()
    for secret in (owner, kept["key"]):
        assert secret not in shown + commands
    assert "ELASTUNE_AGENT" not in shown


def test_no_token_can_be_seen_by_others_and_a_job_that_somebody_cancels_is_a_loss_like_others(tmp_path: Path) -> None:
    """Jobs start, are cancelled, and start again."""
    with up(tmp_path, "--slurm", POOL) as scheduler:
        trial = scheduler.submit("2:2", 400)
        scheduler.until_state(trial, "running")
        assert_no_token_can_be_seen_by_others(scheduler)
        slurm("scancel", jobs(state="R")[0])
        until(lambda: len(scheduler.starts(trial)) >= 3, 60.0, "it does not go on")
        scheduler.until_state(trial, "running")
        latest = max(scheduler.epochs(trial))
        until(lambda: max(scheduler.epochs(trial)) > latest, 30.0, "it does not train on")


def test_preemption_makes_a_trial_wait_with_a_reason_and_it_goes_on_from_where_it_was(tmp_path: Path) -> None:
    """Slurm preempts and requeues in its own time: half a minute."""
    with up(tmp_path, "--slurm", POOL) as scheduler:
        trial = scheduler.submit("2:2", 3000)
        scheduler.until_state(trial, "running")
        slurm(
            "sbatch",
            "--partition=main",
            "--nodes=2",
            "--exclusive",
            "--job-name=elastune-test",
            "--output=/dev/null",
            "--wrap=sleep 15",
        )
        until(lambda: scheduler.state_of(trial) == "paused", 90.0, "it is not preempted")
        reached = max(scheduler.epochs(trial))
        until(lambda: "slots are queued in scavenge" in scheduler.why(trial), 30.0, scheduler.why(trial))
        scheduler.until_state(trial, "running", 60.0)
        until(lambda: max(scheduler.epochs(trial)) > reached + 1, 30.0, "it does not train on")
        after = scheduler.epochs(trial)
        assert min(after[-2:]) >= reached - 1, "what was done before is not done again"
        scheduler.run("stop", trial)


def test_a_controller_that_is_away_stops_no_trial_and_no_job_is_asked_for_twice(tmp_path: Path) -> None:
    """Commands to a controller that is away take their time to fail."""
    home = Path(os.environ["SLURM_CONF"]).parent
    with up(tmp_path, "--slurm", POOL) as scheduler:
        trial = scheduler.submit("1:1", 10_000)
        scheduler.until_state(trial, "running")
        # A controller that is killed before it has written a job down forgets it.
        time.sleep(5.0)
        os.kill(int((home / "slurmctld.pid").read_text()), 9)
        try:
            second = scheduler.submit("1:1", 3)
            reached = max(scheduler.epochs(trial))
            until(
                lambda: any(each in scheduler.why(second) for each in ("contact", "not answer", "refused")),
                60.0,
                "nobody says that Slurm is away",
            )
            assert max(scheduler.epochs(trial)) > reached
        finally:
            subprocess.run(["slurmctld"], check=True, capture_output=True)
        scheduler.until_state(second, "succeeded", 90.0)
        assert len(scheduler.starts(trial)) == len(scheduler.starts(second)) == 1
        assert len(jobs()) <= 2


@pytest.mark.slow
def test_a_time_limit_that_is_near_has_replicas_save_and_move_on(tmp_path: Path) -> None:
    line = "partition=scavenge gpus=1 slots=0:2 idle=3 time=2 warn=40"
    with up(tmp_path, "--slurm", line) as scheduler:
        trial = scheduler.submit("1:1", 10_000)
        scheduler.until_state(trial, "running")
        first = jobs(state="R")
        until(lambda: len(scheduler.starts(trial)) >= 2, 160.0, "it does not move on")
        assert set(jobs()) - set(first)
        shown = scheduler.run("why", trial)
        assert "was killed" not in shown
        scheduler.until_state(trial, "running")
        epochs = scheduler.epochs(trial)
        assert len(epochs) - len(set(epochs)) <= 1, "nothing but the epoch under way is begun twice"


def test_a_scheduler_that_is_killed_finds_its_pool_again_and_another_ones_is_not_touched(tmp_path: Path) -> None:
    """Two schedulers and their jobs start."""
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    with up(tmp_path / "a", "--slurm", POOL) as first, up(tmp_path / "b", "--slurm", POOL) as second:
        mine, others = first.submit("2:2", 10_000), second.submit("1:1", 10_000)
        first.until_state(mine, "running")
        second.until_state(others, "running")
        present = set(jobs(state="R"))
        first.kill()
        first.start_again()
        until(lambda: first.slots_of(mine) == 2 and first.state_of(mine) == "running", 30.0, "it is not found again")
        time.sleep(3.0)
        assert set(jobs(state="R")) >= present
        assert (len(first.starts(mine)), len(second.starts(others))) == (2, 1)
        first.stop()
        until(lambda: len(jobs()) < len(present), 20.0, "its jobs are left")
        assert second.state_of(others) == "running"
    assert until(lambda: not jobs() and not agents(), 30.0, "something is left")


def test_nodes_that_share_no_files_get_the_code_and_send_the_logs_back(tmp_path: Path) -> None:
    """A job of the pool takes 10 s to start."""
    with up(tmp_path, "--slurm", POOL, "--no-shared-files") as scheduler:
        trial = scheduler.submit("2:2", 5)
        scheduler.until_state(trial, "succeeded", 90.0)
        assert set(scheduler.epochs(trial)) == set(range(5))
        assert len(scheduler.starts(trial)) == 2
        left = scheduler.state / "checkpoints" / trial
        until(lambda: not left.exists(), 10.0, "the checkpoint of a trial that is over is left")
    assert not list(Path("/tmp").glob("elastune-*/code")), "what agents have unpacked goes with them"


def test_what_a_trial_has_learned_follows_it_to_nodes_that_share_no_files(tmp_path: Path) -> None:
    """Jobs start one after another, and files travel between them."""
    with up(tmp_path, "--slurm", POOL, "--no-shared-files") as scheduler:
        trial = scheduler.submit("1:1", 10_000)
        scheduler.until_state(trial, "running", 90.0)
        until(lambda: max(scheduler.epochs(trial), default=0) > 5, 60.0, "it does not train")
        for job in jobs(state="R"):
            slurm("scancel", job)
        until(lambda: len(scheduler.starts(trial)) == 2, 60.0, "it does not go on")
        reached = max(scheduler.epochs(trial))
        until(lambda: max(scheduler.epochs(trial)) > reached + 1, 60.0, "it does not train on")
        found = scheduler.epochs(trial)
        assert found.count(0) == 1, "it does not begin again"
        assert sum(found.count(epoch) - 1 for epoch in set(found)) <= 2, "what was done is not done again"
        scheduler.run("stop", trial)


@pytest.mark.slow
def test_slot_hours_agree_with_slurms_own(tmp_path: Path) -> None:
    with up(tmp_path, "--slurm", "partition=scavenge gpus=2 slots=0:4 idle=1000") as scheduler:
        trial = scheduler.submit("1:2", 10_000)
        scheduler.until_state(trial, "running")
        ours = jobs(state="R")
        time.sleep(100.0)
        ours += [job for job in jobs(state="R") if job not in ours]
        scheduler.stop()
        shown = slurm("scontrol", "--oneliner", "show", "job", ",".join(ours))
    seconds = [[int(part) for part in found.split(":")] for found in re.findall(r"RunTime=(\d\d:\d\d:\d\d)", shown)]
    theirs = sum(2 * (3600 * hours + 60 * minutes + rest) for hours, minutes, rest in seconds)
    held = json.loads((scheduler.state / "pool.json").read_text())["slot_seconds"]
    assert len(seconds) == len(ours)
    assert held == pytest.approx(theirs, rel=0.02)


def test_an_nni_experiment_runs_in_the_pool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """NNI's manager takes 10 s to start, and a job of the pool as long."""
    (tmp_path / "nni").mkdir()
    with up(tmp_path, "--slurm", POOL) as scheduler:
        server = json.loads((scheduler.state / "server.json").read_text())
        monkeypatch.setenv("ELASTUNE_URL", server["url"])
        monkeypatch.setenv("ELASTUNE_TOKEN", (scheduler.state / "token").read_text().strip())
        experiment = NniExperiment(tmp_path / "nni", REPORTS, {"maxTrialNumber": 2}, {})
        try:
            experiment.create()
            experiment.until_done()
            assert experiment.states() == ["SUCCEEDED"] * 2
            with scheduler.client() as client:
                assert {trial.state for trial in client.trials()} == {"succeeded"}
        finally:
            experiment.close()


def test_a_sweep_alone_has_a_pool_of_its_own_which_ends_with_it(tmp_path: Path) -> None:
    """A job of the pool takes 10 s to start."""
    (tmp_path / "tune.py").write_text(SWEEP)
    environ = {**os.environ, "ELASTUNE_SLURM": POOL, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "tune.py"], cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=150
    )
    assert "values 12" in done.stdout, done.stderr
    until(lambda: not jobs() and not agents(), 10.0, "its jobs are left")


def test_a_driver_that_is_cancelled_leaves_nothing(tmp_path: Path) -> None:
    """The sweep runs in a job of its own, and its trials in a pool of others."""
    (tmp_path / "tune.py").write_text(SWEEP.replace("0.3", "30.0"))
    environ = {"ELASTUNE_SLURM": POOL, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    words = ("sbatch", "--parsable", "--partition=main", "--job-name=elastune-test", f"--output={tmp_path}/out.txt")
    driver = slurm(*words, f"--wrap=cd {tmp_path}; exec {sys.executable} tune.py", environ=environ)
    until(lambda: len(jobs(state="R")) >= 3, 60.0, "no pool comes up")
    slurm("scancel", driver)
    until(lambda: not jobs() and not agents(), 90.0, "something is left")
