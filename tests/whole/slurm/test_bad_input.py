"""What cannot work ends in one sentence with Slurm's own words in it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.support.project import ROOT
from tests.support.slurm import allocation, jobs, up
from tests.support.waiting import until


def fails(folder: Path, *options: str, environ: Mapping[str, str] | None = None) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "scheduler.cli", "up", "--port", "0", "--state-dir", str(folder / "s"), *options],
        env={**os.environ, "PYTHONPATH": str(ROOT), **(environ or {})},
        capture_output=True,
        text=True,
        timeout=90,
    )
    assert done.returncode not in (0, None)
    assert "Traceback" not in done.stderr
    said = [line for line in done.stderr.splitlines() if line.startswith("elastune: ")]
    assert len(said) == 1, done.stderr
    return said[0]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("partition=nowhere", "invalid partition specified: nowhere"),
        ("gpus=9", "Requested node configuration is not available"),
        ("partition=main gres=tpu:1", "Invalid generic resource (gres) specification"),
        ("colour=red", "unrecognized option '--colour=red'"),
        ("time=soon", "Invalid --time specification"),
    ],
)
def test_jobs_that_slurm_refuses_are_refused_at_the_start(tmp_path: Path, line: str, words: str) -> None:
    said = fails(tmp_path, "--slurm", line)
    assert words in said
    assert jobs() == []


def test_a_machine_without_slurm_says_so(tmp_path: Path) -> None:
    said = fails(tmp_path, "--slurm", "partition=main", environ={"PATH": "/nonexistent"})
    assert "this machine has no Slurm, or its commands are not on PATH" in said


def test_an_interface_that_is_not_there_is_named_with_those_that_are(tmp_path: Path) -> None:
    said = fails(tmp_path, "--slurm", "partition=main", "--interface", "ib7")
    assert "no network interface 'ib7'" in said and "--host" in said


def test_nodes_without_the_environment_say_what_they_lack(tmp_path: Path) -> None:
    with allocation() as job:
        said = fails(tmp_path, "--prologue", "cd /no/such/env || exit 3", environ=job)
    assert "no agent started on the nodes of job" in said and "/no/such/env" in said


def test_jobs_whose_nodes_lack_the_environment_make_trials_wait_with_the_reason(tmp_path: Path) -> None:
    with up(tmp_path, "--slurm", "partition=main gpus=1", "--prologue", "source /no/such/env/activate") as scheduler:
        trial = scheduler.submit("1:1", 1)
        until(
            lambda: "ended before its agent contacted the scheduler" in scheduler.why(trial), 60.0, scheduler.why(trial)
        )
        assert len(jobs()) <= 1


def test_the_doctor_knows_slurm() -> None:
    words = [sys.executable, "-m", "scheduler.cli", "doctor"]
    outside = subprocess.run(words, capture_output=True, text=True, check=False).stdout
    assert "Slurm: partitions main, scavenge; `up --slurm` takes slots from them" in outside
    with allocation() as job:
        environ = {**os.environ, **job}
        inside = subprocess.run(words, capture_output=True, text=True, check=False, env=environ).stdout
    assert f"Slurm: job {job['SLURM_JOB_ID']}: 2 nodes, `up` uses all of them" in inside
