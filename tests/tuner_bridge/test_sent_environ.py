"""What trials of a shared scheduler get of their sweep's environment, and of the scheduler's."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import optuna
import pytest

from scheduler.runtime import differences, runtime
from trials.launch.node_environ import node_environ
from tuner_bridge import optimize
from tuner_bridge.driving.sent_environ import asked_environ, library_settings, sent_environ, withheld
from tuner_bridge.errors import InvalidSweep

HERE = {
    "WANDB_PROJECT": "p",
    "WANDB_API_KEY": "secret",
    "HF_HOME": "/data/hf",
    "HF_TOKEN": "secret",
    "TOKENIZERS_PARALLELISM": "false",
    "DATA_DIR": "/data",
    "AWS_SECRET_ACCESS_KEY": "secret",
    "PATH": "/bin",
    "ELASTUNE_TOKEN": "secret",
}


def test_settings_are_sent_and_secrets_only_when_named() -> None:
    defaults = {"WANDB_PROJECT": "p", "HF_HOME": "/data/hf", "TOKENIZERS_PARALLELISM": "false"}
    assert sent_environ(None, HERE) == defaults
    assert withheld(None, HERE) == ["HF_TOKEN", "WANDB_API_KEY"]
    assert sent_environ(["DATA_DIR", "HF_TOKEN"], HERE) == {**defaults, "DATA_DIR": "/data", "HF_TOKEN": "secret"}
    assert withheld(["HF_TOKEN"], HERE) == ["WANDB_API_KEY"]
    assert sent_environ({"HF_HOME": "/mine", "NEW": ""}, HERE) == {**defaults, "HF_HOME": "/mine", "NEW": ""}


def test_a_scheduler_of_ones_own_gets_the_settings_of_libraries_alone() -> None:
    asked = {"HF_HOME": "/mine", "CUDA_VISIBLE_DEVICES": "1", "DATA_DIR": "/data", "PATH": "/bin"}
    assert library_settings(asked) == {"HF_HOME": "/mine"}
    assert library_settings(None) == {}


@pytest.mark.parametrize(
    ("asked", "match"),
    [
        (["NO_SUCH_VARIABLE"], "not set here"),
        ("DATA_DIR", r"such as \['DATA_DIR'\]"),
        ({"A B": "x"}, "name of a variable"),
        ({"A=B": "x"}, "name of a variable"),
        ({"ELASTUNE_TOKEN": "x"}, "not one of Elastune's own"),
        ({"A": 1}, "must be a string"),
        ({"A": "x\0"}, "must be a string"),
        ([1], "name of a variable"),
    ],
)
def test_what_cannot_be_sent_is_refused(asked: Any, match: str) -> None:
    with pytest.raises(InvalidSweep, match=match):
        asked_environ(asked)


def test_a_shared_scheduler_hands_on_what_belongs_to_its_machine() -> None:
    given = {
        "PATH": "/bin",
        "LC_ALL": "C",
        "CUDA_HOME": "/cuda",
        "WANDB_API_KEY": "k",
        "DATA_DIR": "/x",
        "HOME": "/root",
    }
    assert node_environ(given) == {"PATH": "/bin", "LC_ALL": "C", "CUDA_HOME": "/cuda", "HOME": "/root"}


def test_other_versions_are_told_and_one_installation_is_not_compared() -> None:
    mine = runtime()
    assert mine["torch"] != "none"
    assert differences(mine, {**mine, "torch": "1.0"}) == []
    told = differences(mine, {**mine, "prefix": "/elsewhere", "torch": "1.0", "python": "3.8"})
    assert told == [f"python {mine['python']} here, 3.8 there", f"torch {mine['torch']} here, 1.0 there"]
    assert differences(mine, {**mine, "prefix": "/elsewhere"}) == []


def tell_environment(trial: Any) -> float:
    for name in ("FROM_SCHEDULER", "DATA_DIR", "WANDB_PROJECT", "HF_TOKEN"):
        trial.set_user_attr(name, os.environ.get(name, "-"))
    return 1.0


@pytest.mark.slow
def test_trials_of_a_shared_scheduler_have_their_sweeps_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A scheduler starts, and cold replicas."""
    command = [sys.executable, "-m", "scheduler.cli", "up", "--state-dir", str(tmp_path / "up"), "--slots", "1"]
    scheduler = subprocess.Popen(
        [*command, "--port", "0"],
        env={**os.environ, "FROM_SCHEDULER": "leaked", "DATA_DIR": "the scheduler's"},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert scheduler.stdout is not None
    try:
        url = scheduler.stdout.readline().split()[-1]
        monkeypatch.setenv("ELASTUNE_URL", url)
        monkeypatch.setenv("ELASTUNE_TOKEN", (tmp_path / "up" / "token").read_text())
        monkeypatch.setenv("DATA_DIR", "/mine")
        monkeypatch.setenv("WANDB_PROJECT", "p")
        monkeypatch.setenv("HF_TOKEN", "secret")
        study = optuna.create_study()
        optimize(study, tell_environment, n_trials=1, environ=["DATA_DIR"])
        seen = study.trials[0].user_attrs
        assert seen == {**seen, "FROM_SCHEDULER": "-", "DATA_DIR": "/mine", "WANDB_PROJECT": "p", "HF_TOKEN": "-"}
        assert "HF_TOKEN" in caplog.text
    finally:
        scheduler.terminate()
        scheduler.wait()
        scheduler.stdout.close()
