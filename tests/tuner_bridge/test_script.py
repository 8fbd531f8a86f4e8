"""Scripts as what trials run, and scripts that are started by themselves."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import optuna
import pytest

from tests.support.project import ROOT
from tuner_bridge import optimize, script
from tuner_bridge.errors import InvalidSweep
from tuner_bridge.in_replica.scripts import Script
from tuner_bridge.optuna import current

optuna.logging.set_verbosity(optuna.logging.ERROR)

TRAIN = """
import sys
import helper
import tuner_bridge
trial = tuner_bridge.current_trial()
assert tuner_bridge.current_trial() is trial
x = trial.suggest_float("x", 0.0, 1.0)
for step in range(int(sys.argv[sys.argv.index("--steps") + 1])):
    trial.report(helper.scaled(x) + step, step)
    if trial.should_prune():
        import optuna
        raise optuna.TrialPruned
if "--tell" in sys.argv:
    tuner_bridge.tell(42.0)
if "--fail" in sys.argv:
    sys.exit(3)
if "--torch" in sys.argv:
    from tuner_bridge.optuna import TorchDistributedTrial
    assert TorchDistributedTrial(None) is trial and TorchDistributedTrial(trial, device="cpu") is trial
if __name__ != "__main__":
    raise AssertionError("a script is the main program of its replica")
sys.exit(0)
"""


@pytest.fixture
def train(tmp_path: Path) -> Path:
    (tmp_path / "helper.py").write_text("def scaled(x):\n    return 10 * x\n")
    (tmp_path / "train.py").write_text(TRAIN)
    return tmp_path / "train.py"


@pytest.mark.usefixtures("scheduler")
class TestInASweep:
    def test_its_value_is_its_last_report_or_what_it_tells(self, train: Path) -> None:
        made = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=1))
        optimize(made, script(f"{train} --steps 3"), n_trials=2)
        for trial in made.trials:
            assert trial.value == trial.intermediate_values[2] == 10 * trial.params["x"] + 2
        optimize(made, script(["python", str(train), "--steps", "1", "--tell", "--torch"]), n_trials=1)
        assert made.trials[-1].value == 42.0

    def test_a_status_other_than_zero_fails_the_trial(self, train: Path) -> None:
        made = optuna.create_study()
        with pytest.raises(RuntimeError, match="ended with status 3"):
            optimize(made, script(f"{train} --steps 1 --fail"), n_trials=1)
        assert made.trials[0].state is optuna.trial.TrialState.FAIL

    def test_a_script_without_a_value_says_what_to_do(self, train: Path) -> None:
        with pytest.raises(InvalidSweep, match=r"call tuner_bridge\.tell"):
            optimize(optuna.create_study(), script(f"{train} --steps 0"), n_trials=1)

    def test_a_pruned_script_ends_as_pruned(self, train: Path) -> None:
        made = optuna.create_study(pruner=optuna.pruners.ThresholdPruner(upper=-1.0))
        optimize(made, script(f"{train} --steps 2"), n_trials=1)
        assert made.trials[0].state is optuna.trial.TrialState.PRUNED

    def test_only_the_replica_that_speaks_for_the_trial_needs_a_value(self, train: Path) -> None:
        train.write_text(TRAIN.replace("if __name__", "import dist_core\nif __name__"))
        made = optuna.create_study()
        optimize(made, script(f"{train} --steps 2"), n_trials=1, min_replicas=2, max_replicas=2)
        assert made.trials[0].value == made.trials[0].intermediate_values[1]

    def test_each_trial_imports_the_scripts_own_modules_as_python_would(self, train: Path) -> None:
        (train.parent / "sub").mkdir()
        (train.parent / "sub" / "helper.py").write_text("def scaled(x):\n    return -1.0\n")
        moved = train.rename(train.parent / "sub" / "train.py")
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(train.parent)
            made = optuna.create_study()
            optimize(made, script(f"{moved} --steps 1"), n_trials=4)
        assert [trial.value for trial in made.trials] == [-1.0] * 4

    def test_the_trial_may_be_asked_for_in_a_module_that_the_script_imports(self, train: Path) -> None:
        (train.parent / "helper.py").write_text(
            "import tuner_bridge\ntrial = tuner_bridge.current_trial()\n"
            "def scaled(x):\n    return float(trial.number)\n"
        )
        made = optuna.create_study()
        optimize(made, script(f"{train} --steps 1"), n_trials=4)
        assert [trial.value for trial in made.trials] == [0.0, 1.0, 2.0, 3.0]

    def test_a_module_is_run_as_python_would(self, train: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.syspath_prepend(str(train.parent))
        made = optuna.create_study()
        optimize(made, script("-m train --steps 1"), n_trials=1)
        assert made.trials[0].state is optuna.trial.TrialState.COMPLETE

    def test_code_is_run_as_python_would(self, train: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(train.parent)
        made = optuna.create_study()
        typed = "def f(x: int): ...\nassert f.__annotations__ == {'x': int}\n"
        optimize(made, script(["python", "-c", typed + TRAIN, "--steps", "2"]), n_trials=1)
        assert made.trials[0].value == made.trials[0].intermediate_values[1]


def test_a_script_runs_alone_with_parameters_of_its_own(train: Path) -> None:
    run = subprocess.run(
        [sys.executable, str(train), "--steps", "2", "--tell"],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    assert "report: step 1: " in run.stderr
    assert "value: 42.0" in run.stderr


def test_a_script_runs_alone_with_given_parameters(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setenv("ELASTUNE_PARAMS", '{"x": 0.25}')
    monkeypatch.setattr(current._Current, "trial", None)
    trial = current.current_trial()
    trial.report(10 * trial.suggest_float("x", 0.0, 1.0), 0)
    assert "report: step 0: 2.5" in capsys.readouterr().err
    monkeypatch.setattr(current._Current, "trial", None)
    monkeypatch.setenv("ELASTUNE_PARAMS", "0.25")
    with pytest.raises(InvalidSweep, match=r"ELASTUNE_PARAMS is '0.25'; it must be a JSON object"):
        current.current_trial()


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("", "must name a Python file"),
        ("--epochs 50", "must name a Python file"),
        ("nowhere.py --epochs 50", "'nowhere.py' does not exist"),
    ],
)
def test_what_is_no_script_is_refused(command: Any, words: str) -> None:
    with pytest.raises(InvalidSweep, match=words):
        script(command)


def test_its_imports_are_known_without_running_it(train: Path) -> None:
    train.write_text("import os\nimport optuna.samplers\nimport helper\nfrom not_there import anything\nimport torch\n")
    assert script(str(train)).imports() == ("optuna.samplers", "torch")
    train.write_text("this is no Python")
    assert script(str(train)).imports() == ()
    assert Script(path=None, module="x", arguments=()).imports() == ()
