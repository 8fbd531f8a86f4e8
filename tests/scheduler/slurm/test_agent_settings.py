"""What agents are started with: scripts, their environment, and what of it is nobody else's."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from scheduler.errors import SchedulerError
from scheduler.slurm.agents import CONTAINED, AgentSettings, container_options


def test_nobody_elses_replicas_get_the_environment_of_a_shared_scheduler(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in (
        "ELASTUNE_TOKEN",
        "PGPASSWORD",
        "AWS_SECRET_ACCESS_KEY",
        "CUDA_VISIBLE_DEVICES",
        "CUDA_HOME",
        "TMPDIR",
    ):
        monkeypatch.setenv(name, "mine")
    monkeypatch.setenv("PYTHONPATH", "/somewhere")
    own = AgentSettings(state_dir=tmp_path).environ()
    shared = AgentSettings(state_dir=tmp_path, is_shared=True).environ()
    contained = AgentSettings(state_dir=tmp_path, container=("--container-image=i",)).environ()
    for environ in (own, shared, contained):
        assert not {"ELASTUNE_TOKEN", "PGPASSWORD", "CUDA_VISIBLE_DEVICES", "TMPDIR"} & environ.keys()
        assert environ["CUDA_HOME"] == "mine"
    assert own["AWS_SECRET_ACCESS_KEY"] == "mine" and "AWS_SECRET_ACCESS_KEY" not in shared
    assert own["PYTHONPATH"].endswith(":/somewhere") and "PYTHONPATH" not in contained


def test_a_prologue_that_fails_ends_the_job_with_its_words(tmp_path: Path) -> None:
    fails = AgentSettings(state_dir=tmp_path, prologue="echo loading\ncd /no/such/folder")
    for words in (["/bin/bash", "-c", fails.job_script()], ["/bin/bash", "-c", fails.command[2]]):
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        assert done.returncode == 1 and done.stdout == "loading\n"
        assert "elastune: the prologue failed, status 1" in done.stderr
    works = AgentSettings(state_dir=tmp_path, prologue="export FOUND=here")
    script = works.job_script().replace("exec ", "echo $FOUND ")
    assert subprocess.run(["/bin/bash", "-c", script], capture_output=True, text=True, check=True).stdout.startswith(
        "here "
    )


def test_what_is_no_option_for_containers_is_refused() -> None:
    assert container_options("--container-image=a.sqsh --container-mounts='/my data:/data'") == (
        "--container-image=a.sqsh",
        "--container-mounts=/my data:/data",
    )
    for text, words in (
        ("img.sqsh", "it takes only srun's options"),
        ("--container-image='a", "cannot be parsed as options"),
    ):
        with pytest.raises(SchedulerError, match=words):
            container_options(text)


STANDS_FOR_SRUN = """#!/bin/bash
trap 'echo told; sleep 0.3; echo left; exit 0' USR1
echo up
touch "$UP"
for _ in {1..600}; do sleep 0.05; done
"""
"""srun would end its step by force where it is told to end itself; this tells what it is told."""


@pytest.fixture
def with_a_stand_in(tmp_path: Path) -> dict[str, str]:
    """The environment of a shell that finds it as srun."""
    srun = tmp_path / "srun"
    srun.write_text(STANDS_FOR_SRUN)
    srun.chmod(0o755)
    return {"PATH": f"{tmp_path}:/usr/bin:/bin", "UP": str(tmp_path / "up")}


def test_in_a_container_the_agent_hears_that_its_job_ends(with_a_stand_in: dict[str, str], tmp_path: Path) -> None:
    script = AgentSettings(state_dir=tmp_path, container=("--container-image=img.sqsh",)).job_script()
    assert "srun --ntasks=1" in script and "--container-image=img.sqsh python3 -m trials.agents.start" in script
    with subprocess.Popen(
        ["/bin/bash", "-c", script], env=with_a_stand_in, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
        process.terminate()
        assert process.stdout.read() == "told\nleft\n"
        assert process.wait(10.0) == 0


def test_an_agent_hears_of_what_came_before_the_shell_had_noted_it(with_a_stand_in: dict[str, str]) -> None:
    """The shell is told between the agent's start and the line that notes its pid."""
    early = "until [ -e $UP ]; do sleep 0.01; done; kill -TERM $$\nagent=$!"
    lines = CONTAINED.format(start="srun").replace("agent=$!", early)
    done = subprocess.run(
        ["/bin/bash", "-c", lines], env=with_a_stand_in, capture_output=True, text=True, timeout=30.0, check=False
    )
    assert (done.stdout, done.stderr, done.returncode) == ("up\ntold\nleft\n", "", 0)


def test_what_an_agent_is_told_is_plain_json(tmp_path: Path) -> None:
    settings = AgentSettings(state_dir=tmp_path, memory_per_slot=2.0, shares_files=False)
    found = json.loads(settings.description("http://h:1", "secret"))
    assert (found["memory_bytes"], found["shares_files"], found["url"]) == (2 * 2**30, False, "http://h:1")
