"""Sweeps that a library starts by itself run as elastic trials, and its own code is as it was."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.scripts import run_python

LIBRARY = """
import os
import optuna
optuna.logging.set_verbosity(optuna.logging.WARNING)

class Objective:
    def __init__(self, factor):
        self.factor = factor
    def __call__(self, trial):
        x = trial.suggest_float("x", 0, 1)
        trial.set_user_attr("process", os.getpid())
        print("factor", self.factor, flush=True)
        if x > 2:
            raise ValueError
        return x * self.factor

def tune(n_trials):
    seen = []
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=3))
    noted = [lambda study, trial: seen.append(trial.number)]
    study.optimize(Objective(2), n_trials, catch=(ValueError,), callbacks=noted)
    assert seen == list(range(n_trials)), seen
    return study

def tune_by_asking():
    study = optuna.create_study(study_name="asked")
    for _ in range(2):
        trial = study.ask()
        study.tell(trial, trial.suggest_float("x", 0, 1))
    return study
"""
SCRIPT = """
import os
import library
study = library.tune(3)
print("VALUES", [trial.value for trial in study.trials])
print("HERE", [trial.user_attrs["process"] == os.getpid() for trial in study.trials])
print("STATES", [trial.state.name for trial in library.tune_by_asking().trials])
"""


def lines(text: str, word: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith(word)]


@pytest.mark.slow
def test_a_librarys_sweep_is_elastic_within_the_block_and_by_the_command(tmp_path: Path) -> None:
    (tmp_path / "library.py").write_text(LIBRARY)
    (tmp_path / "plain.py").write_text(SCRIPT)
    plain = run_python(tmp_path, "plain.py", clean=True).stdout
    assert lines(plain, "HERE") == ["HERE [True, True, True]"]

    body = SCRIPT.replace("\n", "\n    ")
    guarded = f"from tuner_bridge import elastune_studies\nwith elastune_studies(slots=1, max_replicas=1):{body}\n"
    (tmp_path / "block.py").write_text(guarded)
    block = run_python(tmp_path, "block.py", clean=True)
    elastune = "import sys; from scheduler.cli import main; sys.exit(main())"
    asked = ["run", "--slots", "1", "--show-output", "--", "python", "plain.py"]
    command = run_python(tmp_path, "-c", elastune, *asked, clean=True)
    for done in (block, command):
        assert lines(done.stdout, "VALUES") == lines(plain, "VALUES")
        assert lines(done.stdout, "HERE") == ["HERE [False, False, False]"]
        assert lines(done.stdout, "STATES") == ["STATES ['COMPLETE', 'COMPLETE']"]
        assert done.stderr.count("library asks study 'asked' for trials and runs them in this process") == 1
    assert lines(block.stdout, "[trial") == []
    assert sorted(lines(command.stdout, "[trial")) == [f"[trial {number}] factor 2" for number in range(3)]


def test_what_is_no_program_of_this_python_is_refused(tmp_path: Path) -> None:
    code = "import sys; from scheduler.cli import main; sys.exit(main())"
    for command in (["./train"], ["python", "-V"], ["bash", "-c", "python x.py"]):
        done = run_python(tmp_path, "-c", code, "run", "--", *command, succeeds=False)
        assert done.returncode != 0
        assert "it must be a program of this environment's Python" in done.stderr, done.stderr
