"""A command in another language as an objective: what it prints is what is reported, pruned by and returned."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import optuna
import pytest
from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

from tuner_bridge import optimize, program
from tuner_bridge.errors import InvalidSweep

SPACE = {"lr": FloatDistribution(1e-3, 1.0, log=True), "depth": IntDistribution(1, 4)}
REPORT = r"epoch (?P<step>\d+): loss (?P<value>\S+)"
LEARNS = """
lr=$1; depth=$2
for epoch in 0 1 2; do
    echo "starting"
    awk -v lr=$lr -v depth=$depth -v e=$epoch 'BEGIN { printf "epoch %d: loss %.6f\\n", e, lr * depth + 1 / (e + 1) }'
done
echo "done"
"""


@pytest.fixture
def learns(tmp_path: Path) -> str:
    path = tmp_path / "learns.sh"
    path.write_text(LEARNS)
    return str(path)


def study(**options: Any) -> optuna.Study:
    return optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=5), **options)


def test_it_tunes_as_plain_optuna_does(scheduler: Any, learns: str) -> None:
    objective = program(f"sh {learns} {{lr}} {{depth}}", SPACE, report=REPORT)
    ours, plain = study(), study()
    optimize(ours, objective, n_trials=4)
    plain.optimize(objective, n_trials=4)
    for mine, theirs in zip(ours.trials, plain.trials, strict=True):
        assert (mine.params, mine.value, mine.intermediate_values) == (
            theirs.params,
            theirs.value,
            theirs.intermediate_values,
        )
    assert sorted(ours.trials[0].intermediate_values) == [0, 1, 2]


class Second(optuna.pruners.BasePruner):
    def prune(self, study: optuna.Study, trial: optuna.trial.FrozenTrial) -> bool:
        return len(trial.intermediate_values) >= 2


def test_a_pruned_program_is_ended(scheduler: Any, tmp_path: Path) -> None:
    mark = tmp_path / "went on"
    words = ["sh", "-c", f"echo loss {{x}}; echo loss 2; sleep 120; touch {mark}"]
    objective = program(words, {"x": FloatDistribution(0.0, 1.0)}, report=r"loss (\S+)")
    made = study(pruner=Second())
    optimize(made, objective, n_trials=1)
    assert made.trials[0].state is optuna.trial.TrialState.PRUNED
    assert list(made.trials[0].intermediate_values) == [0, 1]
    assert not mark.exists()


def test_the_value_is_that_of_its_line_and_failures_say_what_was_printed(scheduler: Any) -> None:
    which = {"kind": CategoricalDistribution(["a", "b"])}
    made = study()
    optimize(made, program(["echo", "{kind} accuracy=0.75"], which, value=r"accuracy=(\S+)"), n_trials=1)
    assert made.trials[0].value == 0.75
    for words, said in (
        (
            ["sh", "-c", "echo {kind}; echo no memory; exit 3"],
            "sh ended with status 3; the last it printed: .* no memory",
        ),
        (["echo", "{kind}"], "no line that echo printed matches"),
        (["echo", "{kind} accuracy=high"], "the value 'high' is not a number, in the line"),
        (["/no/such/program", "{kind}"], "/no/such/program cannot be run"),
    ):
        with pytest.raises(Exception, match=said):
            optimize(study(), program(words, which, value=r"accuracy=(\S+)"), n_trials=1)


@pytest.mark.parametrize(
    ("command", "space", "options", "words"),
    [
        ("", SPACE, {"report": REPORT}, "the command is empty"),
        ("train {lr}", SPACE, {"report": REPORT}, "'depth' is not used in the command; write it as {depth}"),
        ("train {lr} {depth} {width}", SPACE, {"report": REPORT}, "{width}, which is not in the space"),
        ("train {lr} {depth}", SPACE, {}, "the value of a trial cannot be found"),
        ("train {lr} {depth}", SPACE, {"report": "loss ("}, "is not a valid regular expression"),
        ("train {lr} {depth}", SPACE, {"value": "loss"}, "put its number into a group"),
        ("train {lr}", {"lr": 0.1}, {"report": REPORT}, "give one of optuna.distributions"),
    ],
)
def test_what_cannot_be_run_is_refused_at_once(command: str, space: Any, options: Any, words: str) -> None:
    with pytest.raises(InvalidSweep, match=words):
        program(command, space, **options)


def test_a_program_runs_on_one_replica() -> None:
    objective = program("train {lr} {depth}", SPACE, report=REPORT)
    with pytest.raises(InvalidSweep, match="a program runs on one replica"):
        optimize(study(), objective, n_trials=1, min_replicas=2)
