"""Replicas see the script as it was started: its arguments, folder, and what stands under its ``__main__`` guard."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from tests.support.scripts import run_python

HEAD = "import os, sys, optuna, tuner_bridge\n"
TAIL = """
if __name__ == "__main__":
{guarded}
    study = optuna.create_study()
    tuner_bridge.optimize(study, objective, n_trials=1, slots=1, state_dir="state")
    print("VALUE", study.trials[0].value, study.trials[0].user_attrs)
"""


def run(
    folder: Path, script: str, guarded: str = "    pass", *arguments: str | bytes
) -> subprocess.CompletedProcess[str]:
    return run_text(folder, HEAD + script + TAIL.format(guarded=guarded), *arguments)


def run_text(folder: Path, text: str, *arguments: str | bytes) -> subprocess.CompletedProcess[str]:
    (folder / "tune.py").write_text(text)
    return run_python(folder, "tune.py", *arguments, succeeds=False)


def value_of(done: subprocess.CompletedProcess[str]) -> str:
    assert done.returncode == 0, done.stderr[-3000:]
    return next(line for line in done.stdout.splitlines() if line.startswith("VALUE")).split(maxsplit=1)[1]


def test_arguments_folder_and_what_is_assigned_under_the_guard(tmp_path: Path) -> None:
    script = """
import argparse
parser = argparse.ArgumentParser()
parser.add_argument("required")
parser.add_argument("--data", default="small")
arguments = parser.parse_args()
EPOCHS = 1

def objective(trial):
    assert os.path.exists("tune.py") and sys.argv[1:] == ["needed", "--data", "big"], sys.argv
    trial.set_user_attr("file", OPTIONS.file)
    return {"small": 1, "big": 2}[arguments.data] + EPOCHS + of_a_helper()

def of_a_helper():
    return LATE["width"] + math.floor(0.5)

def prepare():
    global LATE
    LATE = {"width": 1000}
"""
    guarded = """
    import math
    EPOCHS = 50
    OPTIONS = argparse.Namespace(file=os.fsdecode(b"caf\\xe9.csv"))
    prepare()
"""
    done = run(tmp_path, script, guarded, "needed", "--data", "big")
    assert value_of(done).startswith("1052.0")
    assert "'file': 'caf\\udce9.csv'" in value_of(done)


@pytest.mark.slow
@pytest.mark.parametrize("library", ["click", "hydra"])
def test_a_command_line_library_around_the_sweep(tmp_path: Path, library: str) -> None:
    """The sweep starts in the decorated function; what it tells the objective by a global arrives."""
    pytest.importorskip(library)
    scripts = {
        "click": """
import click

@click.command()
@click.option("--width", type=int)
def main(width):
    global WIDTH
    WIDTH = width
    sweep()
""",
        "hydra": """
import hydra

@hydra.main(version_base=None, config_path=None)
def main(config):
    global WIDTH
    WIDTH = int(config.width)
    sweep()
""",
    }
    body = """
def objective(trial):
    return WIDTH

def sweep():
    study = optuna.create_study()
    tuner_bridge.optimize(study, objective, n_trials=1, slots=1, state_dir="state")
    print("VALUE", study.trials[0].value)

if __name__ == "__main__":
    main()
"""
    (tmp_path / "tune.py").write_text(HEAD + scripts[library] + body)
    words = ["--width", "7"] if library == "click" else ["+width=7", "hydra.run.dir=.", "hydra/job_logging=none"]
    assert value_of(run_python(tmp_path, "tune.py", *words)) == "7.0"


def test_an_objective_that_was_typed_in_runs(tmp_path: Path) -> None:
    cell = "import optuna, tuner_bridge\ndef objective(trial):\n    return 1.5\nstudy = optuna.create_study()\n"
    cell += "tuner_bridge.optimize(study, objective, n_trials=1, slots=1)\nprint('VALUE', study.best_value)\n"
    typed = f"exec(compile({json.dumps(cell)}, '<cell 1>', 'exec'))"
    assert value_of(run_python(tmp_path, "-c", typed)) == "1.5"
