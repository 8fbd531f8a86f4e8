"""What Optuna takes, an elastic sweep takes, and ends with the same study: choices, reports, copies, pickles."""

from __future__ import annotations

import copy
import decimal
import fractions
import logging
import math
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import optuna
import pytest
from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

from tuner_bridge import optimize
from tuner_bridge.driving.exchange import Answers
from tuner_bridge.driving.study_driver import LONGEST_FILE_NAME, file_name
from tuner_bridge.errors import InvalidSweep
from tuner_bridge.in_replica.wire import decode_exception
from tuner_bridge.optuna.program import program

TABLE = {"sgd": 0, "adam": 1}
CHOICES: dict[str, Callable[[], Any]] = {
    "a dictionary": lambda: {0: 10, 1: 20},
    "its keys": lambda: TABLE.keys(),
    "a set of one": lambda: {"one"},
    "an array": lambda: np.arange(2),
    "numbers of NumPy": lambda: np.array(["a", "b"]),
    "not a number": lambda: [math.nan, 0.0],
    "one and true": lambda: [1, True, 1.0],
}
VALUES: dict[str, Any] = {
    "decimal": decimal.Decimal("0.5"),
    "fraction": fractions.Fraction(1, 2),
    "float32": np.float32(0.5),
    "array": np.array(0.5),
    "text": "0.5",
}


def chooses(trial: optuna.Trial) -> float:
    kind = trial.study.user_attrs["kind"]
    chosen = trial.suggest_categorical("x", CHOICES[kind]())
    trial.set_user_attr("chosen", repr(chosen.item() if hasattr(chosen, "item") else chosen))
    return 0.0


def reports(trial: optuna.Trial) -> float:
    trial.report(VALUES[trial.study.user_attrs["kind"]], 1)
    return 0.0


def draws_by_distribution(trial: optuna.Trial) -> float:
    for name, space in (
        ("x", FloatDistribution(0.1, 1.0, log=True)),
        ("n", IntDistribution(1, 9, step=2)),
        ("c", CategoricalDistribution(["a", "b"])),
    ):
        trial._suggest(name, space)
    return 0.0


def says_whose(trial: optuna.Trial) -> float:
    trial.suggest_float("x", 0.0, 1.0)
    return 1.0 if trial.study.user_attrs.get("whose") == "the copy's" else 0.0


def of_both(objective: Callable[[optuna.Trial], float], kind: str, n_trials: int = 4) -> list[list[tuple[Any, ...]]]:
    found = []
    for run in (optuna.Study.optimize, optimize):
        study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=3))
        study.set_user_attr("kind", kind)
        run(study, objective, n_trials=n_trials)
        found.append(
            [
                (repr(trial.params), trial.value, trial.intermediate_values, trial.user_attrs.get("chosen"))
                for trial in study.trials
            ]
        )
    return found


@pytest.mark.filterwarnings("ignore:Choices for a categorical distribution")
@pytest.mark.parametrize("kind", CHOICES)
def test_choices_are_what_the_objective_gave(kind: str, scheduler_in_process: Any) -> None:
    plain, ours = of_both(chooses, kind)
    if kind in ("an array", "numbers of NumPy"):
        plain, ours = ([row[1:] for row in rows] for rows in (plain, ours))
    assert ours == plain


@pytest.mark.parametrize("kind", VALUES)
def test_reports_are_what_float_makes_of_them(kind: str, scheduler_in_process: Any) -> None:
    plain, ours = of_both(reports, kind, n_trials=1)
    assert ours == plain


def test_libraries_draw_by_distribution(scheduler_in_process: Any) -> None:
    plain, ours = of_both(draws_by_distribution, "")
    assert ours == plain


def draws_a_large_space(trial: optuna.Trial) -> float:
    total = sum(trial.suggest_int(f"bit{at}", 0, 1) for at in range(300))
    if trial.number % 3 == 1:
        total += trial.suggest_int("branch", 0, 9)
    return total + trial.suggest_float("last", 0.0, 1.0)


def test_a_large_space_that_branches_is_drawn_alike(scheduler_in_process: Any) -> None:
    """Values travel ahead of the questions; where the objective asks for something else, none of it shows."""
    studies = [optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=4)) for _ in range(2)]
    studies[0].optimize(draws_a_large_space, n_trials=5)
    optimize(studies[1], draws_a_large_space, n_trials=5)
    plain, ours = ([(trial.params, trial.value) for trial in study.trials] for study in studies)
    assert ours == plain


def test_a_callback_may_pickle_and_copy_the_study(scheduler_in_process: Any) -> None:
    kept: list[optuna.Study] = []

    def keep(study: optuna.Study, trial: optuna.trial.FrozenTrial) -> None:
        kept.extend((pickle.loads(pickle.dumps(study)), copy.deepcopy(study)))

    study = optuna.create_study()
    optimize(study, says_whose, n_trials=2, callbacks=[keep])
    assert type(study) is optuna.Study
    assert [type(each) for each in kept] == [optuna.Study] * 4
    assert [len(each.trials) for each in kept] == [1, 1, 2, 2]
    kept[0].optimize(lambda trial: 3.0, n_trials=1)
    assert kept[0].trials[-1].value == 3.0


@pytest.mark.parametrize(
    "how", ["file", *(pytest.param(how, marks=pytest.mark.slow) for how in ("copy_study", "backup"))]
)
def test_a_copy_of_a_study_runs_its_own_trials(
    how: str, tmp_path: Path, scheduler_in_process: Any, caplog: pytest.LogCaptureFixture
) -> None:
    first, second = (f"sqlite:///{tmp_path / name}.db" for name in ("first", "second"))

    def sweep(storage: str, whose: str) -> optuna.Study:
        study = optuna.create_study(study_name=f"copied-{how}", storage=storage, load_if_exists=True)
        study.set_user_attr("whose", whose)
        optimize(study, says_whose, n_trials=1)
        return study

    sweep(first, "the original's")
    if how == "copy_study":
        optuna.copy_study(from_study_name=f"copied-{how}", from_storage=first, to_storage=second)
    else:
        shutil.copy(tmp_path / "first.db", tmp_path / "second.db")
    sweep(first, "the original's")
    if how == "backup":
        shutil.copy(tmp_path / "second.db", tmp_path / "first.db")
        second = first
    with caplog.at_level(logging.WARNING):
        study = sweep(second, "the copy's")
    assert [trial.value for trial in study.trials] == [0.0, 1.0]
    assert all("x" in trial.params for trial in study.trials)
    assert "is a copy" in caplog.text
    caplog.clear()
    assert len(sweep(second, "the copy's").trials) == 3
    assert "is a copy" not in caplog.text, "it has been a study of its own since"


def test_a_known_question_with_another_method_or_other_arguments_is_refused() -> None:
    answers = Answers()
    asked: list[str] = []

    def ask(method: str, arguments: dict[str, Any]) -> Any:
        asked.append(method)
        return len(asked)

    first = {"id": "r/1", "method": "a", "arguments": {"x": 1}}
    assert answers.to(first, ask) == answers.to(dict(first), ask)
    for other in ({**first, "method": "b"}, {**first, "arguments": {"x": 2}}):
        with pytest.raises(Exception, match="two processes of a trial must not share"):
            raise decode_exception(answers.to(other, ask)["answer"]["exception"])
    assert asked == ["a"]


def test_each_study_has_a_folder_of_its_own_that_can_be_made(tmp_path: Path) -> None:
    names = ["a/b", "a-b", "a b", "..", "", ".a", "a", "x" * 342, "x" * 343, "学習率の探索" * 20, "学習率の探索" * 21]
    folders = [file_name(name) for name in names]
    assert len(set(folders)) == len(names)
    assert file_name("a") == "a"
    for folder in folders:
        assert len(folder.encode()) <= LONGEST_FILE_NAME and os.sep not in folder and not folder.startswith(".")
        (tmp_path / folder).mkdir()


def test_a_folder_that_cannot_be_made_is_told_with_the_way_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ELASTUNE_URL", raising=False)
    (tmp_path / ".elastune").write_text("")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(Exception, match=r"cannot be created: .*name another one with state_dir="):
        optimize(optuna.create_study(study_name="s"), says_whose, n_trials=1, slots=1)


@pytest.mark.parametrize(
    ("command", "space", "words"),
    [
        ("true {lr.real}", {"lr": FloatDistribution(0.0, 1.0)}, r"has \{lr.real\}; write a parameter's name alone"),
        ("true {lr:d}", {"lr": FloatDistribution(0.0, 1.0)}, "cannot be formatted"),
        ("true {0}", {"lr": FloatDistribution(0.0, 1.0)}, r"has \{0\}; write a parameter's name alone"),
    ],
)
def test_a_template_that_could_not_be_filled_is_refused_when_it_is_made(
    command: str, space: dict[str, Any], words: str
) -> None:
    with pytest.raises(InvalidSweep, match=words):
        program(command, space, value="x")


def test_a_template_is_filled_as_it_is_written() -> None:
    space: dict[str, Any] = {
        "optimizer.lr": FloatDistribution(0.25, 0.25),
        "n": IntDistribution(3, 3),
        "lr": FloatDistribution(0.125, 0.125),
    }
    runs = program("echo {optimizer.lr} {n:03d} {lr:.1e} {{}}", space, value=r"(\S+) 003 1.2e-01 \{\}")
    study = optuna.create_study()
    study.optimize(runs, n_trials=1)
    assert study.best_value == 0.25
