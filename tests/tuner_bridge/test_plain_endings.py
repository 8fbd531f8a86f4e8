"""Mistakes end in a sentence, notebooks' functions run, and a sweep in memory leaves nothing behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from dist_core.older_python import add_note
from scheduler.errors import SchedulerUnreachable
from tests.support.scripts import run_python
from tests.support.waiting import until
from tuner_bridge.errors import InvalidSweep, TrialLost
from tuner_bridge.plain_endings import INTERRUPTED, ending_of

SCRIPT = """
import optuna, sys, time
from tuner_bridge import optimize
optuna.logging.set_verbosity(optuna.logging.WARNING)

def objective(trial):
    x = trial.suggest_float("x", 0, 1)
    time.sleep({sleep})
    return x

if __name__ == "__main__":
    study = optuna.create_study()
    optimize(study, objective, {options})
    print("values", len(study.trials))
"""


def script(tmp_path: Path, options: str, *, sleep: float = 0.0) -> Path:
    path = tmp_path / "tune.py"
    path.write_text(SCRIPT.format(options=options, sleep=sleep))
    return path


def run(path: Path, **environ: str) -> subprocess.CompletedProcess[str]:
    return run_python(path.parent, path.name, succeeds=False, clean=True, environ=environ)


@pytest.mark.parametrize(
    ("options", "environ", "words"),
    [
        ("n_trials=1, slots=0", {}, "slots is 0; it must be at least 1"),
        ("n_trials=1", {"ELASTUNE_URL": "http://127.0.0.1:9"}, "no scheduler answers"),
        ("n_trials=1", {"ELASTUNE_SCHEDULER": "lab"}, "have no scheduler 'lab'; there are: none"),
    ],
)
def test_a_mistake_in_a_call_ends_a_script_in_one_sentence(
    tmp_path: Path, options: str, environ: dict[str, str], words: str
) -> None:
    done = run(script(tmp_path, options), **environ)
    assert done.returncode == 1
    lines = done.stderr.strip().splitlines()
    assert len(lines) == 2, done.stderr
    assert "tune.py" in lines[0] and "optimize(study" in lines[0]
    assert lines[1].startswith("elastune: ") and words in lines[1]
    assert not (tmp_path / ".elastune").exists()


def test_everything_is_printed_where_it_is_asked_for(tmp_path: Path) -> None:
    done = run(script(tmp_path, "n_trials=1, slots=0"), ELASTUNE_TRACEBACK="1")
    assert "Traceback (most recent call last)" in done.stderr


def test_ctrl_c_ends_without_a_traceback_and_a_sweep_in_memory_leaves_no_folder(tmp_path: Path) -> None:
    path = script(tmp_path, "n_trials=3, slots=1", sleep=30.0)
    environ = {name: value for name, value in os.environ.items() if not name.startswith("ELASTUNE_")}
    running = subprocess.Popen(
        [sys.executable, path.name],
        cwd=tmp_path,
        env=environ,
        stderr=subprocess.PIPE,
        text=True,
        stdout=subprocess.PIPE,
    )
    until(lambda: list(tmp_path.glob(".elastune/*/logs/*/*.log")), 60.0, "a replica has started")
    running.send_signal(signal.SIGINT)
    _, said = running.communicate(timeout=90)
    assert "Traceback" not in said
    assert "elastune: interrupted; running trials were ended" in said
    assert running.returncode not in (0, None)
    assert not (tmp_path / ".elastune").exists()


def test_a_folder_that_was_there_stays(tmp_path: Path) -> None:
    """Of a study in a database, for example, that is called the same."""
    path = script(tmp_path, "n_trials=1, slots=1")
    path.write_text(path.read_text().replace("create_study()", "create_study(study_name='digits')"))
    kept = tmp_path / ".elastune" / "digits" / "checkpoints" / "t1" / "kept"
    kept.parent.mkdir(parents=True)
    kept.write_text("what is to be resumed")
    assert run(path).returncode == 0
    assert (tmp_path / ".elastune" / "digits" / "trials.db").exists()


def test_a_sweep_in_memory_leaves_nothing_behind(tmp_path: Path) -> None:
    done = run(script(tmp_path, "n_trials=2, slots=1"))
    assert done.returncode == 0, done.stderr
    assert "values 2" in done.stdout
    assert sorted(path.name for path in tmp_path.iterdir()) == ["tune.py"]


@pytest.mark.parametrize("elastic", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_sweep_ends_when_its_budget_is_used(tmp_path: Path, elastic: bool) -> None:
    terms = "slots=1, terms=StudyTerms(budget_slot_hours=1 / 3600)"
    path = script(tmp_path, f"n_trials=40, {terms}", sleep=0.3)
    text = path.read_text().replace("import optimize", "import StudyTerms, elastic, optimize")
    if elastic:
        text = text.replace(
            f"optimize(study, objective, n_trials=40, {terms})", f"study.optimize(elastic(objective, {terms}), 40)"
        )
    path.write_text(text)
    done = run(path)
    assert done.returncode == 0, done.stderr
    assert elastic or "is used up, so its sweep ends" in done.stderr
    assert 1 <= int(done.stdout.split("values ")[1]) < 40


def test_only_our_own_errors_end_plainly() -> None:
    assert ending_of(SchedulerUnreachable("nobody"), None) == "elastune: nobody"
    assert ending_of(InvalidSweep("a\x1b[31m"), None) == "elastune: a"
    for other in (ValueError("x"), TrialLost("gone"), KeyboardInterrupt()):
        assert ending_of(other, None) is None
    interrupt = KeyboardInterrupt()
    add_note(interrupt, INTERRUPTED)
    assert ending_of(interrupt, None) == ""


# ---------------------------------------------------------------------- notebooks


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_sweep_runs_in_a_real_notebook_and_shows_its_page(tmp_path: Path) -> None:
    nbformat = pytest.importorskip("nbformat")
    nbclient = pytest.importorskip("nbclient")
    cells = [
        "import optuna\nfrom tuner_bridge import optimize\noptuna.logging.set_verbosity(optuna.logging.WARNING)",
        "FACTOR = 3.0\ndef scaled(x):\n    return x * FACTOR",
        "def objective(trial):\n    return scaled(trial.suggest_float('x', 1.0, 2.0))",
        textwrap.dedent(
            """
            study = optuna.create_study()
            optimize(study, objective, n_trials=2, slots=1, live=True)
            print("best", study.best_value == 3.0 * study.best_params["x"])
            """
        ),
        textwrap.dedent(
            """
            FACTOR = 4.0
            later = optuna.create_study()
            optimize(later, lambda trial: scaled(1), n_trials=1, slots=1)
            print(later.best_value)
            """
        ),
        "optimize(study, 0.0, n_trials=1)",
    ]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    client = nbclient.NotebookClient(
        notebook, timeout=120, kernel_name="python3", allow_errors=True, resources={"metadata": {"path": str(tmp_path)}}
    )
    client.execute()
    outputs = notebook.cells[3].outputs
    assert any("best True" in each.get("text", "") for each in outputs), outputs
    shown = [each["data"]["text/html"] for each in outputs if "text/html" in each.get("data", {})]
    assert any("<iframe" in each and "#code=" in each for each in shown)
    assert any("4.0" in each.get("text", "") for each in notebook.cells[4].outputs)
    [error] = notebook.cells[5].outputs
    assert error["ename"] == "InvalidSweep"


WITHIN = """
import copy, os, pickle, signal, threading, time
import optuna
from tuner_bridge import optimize
from tuner_bridge.errors import InvalidSweep

def square(x):
    return x * x

def by_text(trial):
    assert copy.deepcopy(trial) is trial
    try:
        pickle.dumps(trial)
    except TypeError:
        return globals()["square"](2)

def quick(trial):
    return trial.suggest_float("x", 0, 1)

def slow(trial):
    if trial.number == 1:
        time.sleep(60)
    return quick(trial)

def nested(trial):
    optimize(optuna.create_study(), quick, n_trials=1, slots=1)

def once_more(study, trial):
    try:
        optimize(study, quick, n_trials=1, slots=1)
    except InvalidSweep as error:
        print(error)

def interrupt():
    while len(study.trials) < 2 or not study.trials[1].user_attrs:
        time.sleep(0.02)
    time.sleep(0.3)
    os.kill(os.getpid(), signal.SIGINT)

if __name__ == "__main__":
    try:
        optimize(optuna.create_study(), by_text, n_trials=1, slots=1)
    except KeyError as error:
        print(error.__notes__[-1])
    optimize(optuna.create_study(), nested, n_trials=1, slots=1, catch=InvalidSweep)
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=0))
    threading.Thread(target=interrupt, daemon=True).start()
    try:
        optimize(study, slow, n_trials=3, slots=1, callbacks=[once_more])
    except KeyboardInterrupt:
        print([trial.state.name for trial in study.trials])
"""


@pytest.mark.slow
def test_a_sweep_within_a_sweep_is_refused_and_an_interrupted_trial_in_memory_has_failed(tmp_path: Path) -> None:
    (tmp_path / "within.py").write_text(WITHIN)
    done = run_python(tmp_path, "within.py")
    assert "optimize() was called by an objective, within a trial of another sweep" in done.stderr
    by_text, refused, states = done.stdout.splitlines()
    assert by_text.startswith("'square' is a global of the script, but replicas have those only that the objective's")
    assert "is at work on study" in refused and "pass n_jobs=" in refused
    assert states == "['COMPLETE', 'FAIL']"
