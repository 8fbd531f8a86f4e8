"""Slurm's words, and in which job a process is."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from trials.errors import SlurmRefused, SlurmUnreachable
from trials.slurm.commands import Slurm, allocation, complaint, outside_of_steps


def hostnames(text: str) -> list[str]:
    assert text == "n[1-3]"
    return ["n1", "n2", "n3"]


def test_a_process_knows_its_job_and_in_a_step_the_steps_nodes() -> None:
    job = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-3]", "SLURM_JOB_PARTITION": "gpu", "SLURMD_NODENAME": "n1"}
    found = allocation(job, hostnames)
    assert found is not None and (found.nodes, found.here, found.is_this_machine) == (("n1", "n2", "n3"), "n1", False)
    script = allocation({**job, "SLURM_STEP_ID": "4294967291", "SLURM_STEP_NODELIST": "n1"}, hostnames)
    assert script == found
    step = allocation({**job, "SLURM_STEP_ID": "0", "SLURM_STEP_NODELIST": "n1"}, hostnames)
    assert step is not None and step.is_this_machine
    shell = allocation({**job, "SLURMD_NODENAME": "login"}, hostnames)
    assert shell is not None and (shell.here, shell.is_this_machine) == ("", False)
    alone = allocation({**job, "SLURM_JOB_NODELIST": "n1"}, hostnames)
    assert alone is not None and alone.is_this_machine, "that needs none of Slurm's commands"
    assert allocation({"SLURM_JOB_ID": "7"}, hostnames) is None


def test_commands_do_not_go_by_the_step_or_the_habits_of_who_calls_them() -> None:
    habits = {"SQUEUE_STATES": "R", "SLURM_CONF": "/c", "SLURM_NTASKS": "4", "SCANCEL_INTERACTIVE": "1", "PATH": "/bin"}
    assert outside_of_steps({**habits, "SBATCH_ACCOUNT": "x", "SBATCH_TIMELIMIT": "1"}) == {
        "SLURM_CONF": "/c",
        "PATH": "/bin",
        "SBATCH_ACCOUNT": "x",
    }
    inside = {**habits, "SLURM_JOB_ID": "7", "SBATCH_ACCOUNT": "x"}
    assert outside_of_steps(inside) == {"SLURM_CONF": "/c", "PATH": "/bin"}


@pytest.mark.parametrize(
    ("words", "error"),
    [
        ("sbatch: error: Batch job submission failed: Invalid account", SlurmRefused),
        ("squeue: error: Unable to contact slurm controller (connect failure)", SlurmUnreachable),
        ("slurm_load_jobs error: Zero Bytes were transmitted or received", SlurmUnreachable),
    ],
)
def test_what_passes_is_told_from_what_is_refused(tmp_path: Path, words: str, error: type[Exception]) -> None:
    command = tmp_path / "sbatch"
    command.write_text(f"#!/bin/sh\necho '{words}' >&2\nexit 1\n")
    command.chmod(command.stat().st_mode | stat.S_IEXEC)
    slurm = Slurm({"PATH": f"{tmp_path}:{os.environ['PATH']}"})
    before = os.environ["PATH"]
    os.environ["PATH"] = f"{tmp_path}:{before}"
    try:
        with pytest.raises(error, match=words.rpartition(": ")[2].replace("(", r"\(").replace(")", r"\)")):
            slurm.run("sbatch", "--parsable")
    finally:
        os.environ["PATH"] = before


def test_of_an_agents_log_people_are_told_what_went_wrong(tmp_path: Path) -> None:
    log = tmp_path / "n1.log"
    assert complaint(log) == ""
    log.write_text("srun: cluster configuration lacks support for cpu binding\nhello\n")
    assert complaint(log) == "hello"
    log.write_text("2026-11-25 22:42:07,017 INFO leaving: its job is being ended\nslurmstepd: error: oom\nthe end\n")
    assert complaint(log) == "leaving: its job is being ended; oom"
