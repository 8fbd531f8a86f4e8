"""Whole sweeps through ``optimize``: an embedded scheduler, real replicas, Optuna's own loop."""

from __future__ import annotations

import math
import os
import signal
import threading
from pathlib import Path
from typing import Any

import optuna
import pytest

from dist_core.errors import InvalidTraining
from dist_core.goodput import Observation, optim_seconds
from dist_core.goodput.speed_profiles import speed_profile
from dist_core.goodput.throughput import gradient_seconds
from scheduler.errors import NotAuthorized, SchedulerUnreachable
from scheduler.host.embedded import EmbeddedScheduler
from tests.support import larger_objectives, objectives
from trials.errors import InvalidTrialSpec
from tuner_bridge import StudyTerms, elastic, optimize
from tuner_bridge.errors import InvalidSweep

optuna.logging.set_verbosity(optuna.logging.ERROR)
COMPLETE, PRUNED, FAIL = optuna.trial.TrialState.COMPLETE, optuna.trial.TrialState.PRUNED, optuna.trial.TrialState.FAIL


def study(**options: Any) -> optuna.Study:
    return optuna.create_study(**{"sampler": optuna.samplers.TPESampler(seed=3), **options})


@pytest.mark.usefixtures("scheduler")
class TestAgainstPlainOptuna:
    """The same study through study.optimize and through optimize, with the same seed: nothing may differ."""

    def test_what_it_reads_and_sets_in_its_trial_is_the_same(self) -> None:
        plain, elastic = study(), study()
        plain.optimize(objectives.uses_attributes, n_trials=2)
        optimize(elastic, objectives.uses_attributes, n_trials=2)
        for expected, found in zip(plain.trials, elastic.trials, strict=True):
            assert (found.params, found.state, found.value) == (expected.params, expected.state, expected.value)

    def test_catch_callbacks_and_stop_are_optunas(self) -> None:
        seen: list[int] = []

        def callback(study: optuna.Study, trial: optuna.trial.FrozenTrial) -> None:
            seen.append(trial.number)
            if trial.number == 3:
                study.stop()

        made = study()
        optimize(made, objectives.sometimes_raises, n_trials=10, catch=(ValueError,), callbacks=[callback])
        assert [trial.state for trial in made.trials] == [COMPLETE, FAIL, COMPLETE, FAIL]
        assert seen == [0, 1, 2, 3]

    def test_an_exception_reaches_the_caller_with_its_type_and_the_replicas_traceback(self) -> None:
        made = study()
        with pytest.raises(KeyError, match="at once") as caught:
            optimize(made, objectives.always_raises, n_trials=3)
        assert "in always_raises" in caught.value.__notes__[0]
        assert [trial.state for trial in made.trials] == [FAIL]

    def test_values_that_are_no_numbers_fail_the_trial_as_in_optuna(self) -> None:
        for objective in (objectives.returns_nan, objectives.returns_nothing):
            made = study()
            optimize(made, objective, n_trials=1)
            assert [trial.state for trial in made.trials] == [FAIL]

    @pytest.mark.parametrize(
        ("objective", "words"),
        [
            (objectives.reports_at_a_step_that_nobody_counts_to, "step"),
            (objectives.reports_at_such_a_step_later, "step"),
            (objectives.sets_more_than_the_scheduler_takes, "33554432"),
            (objectives.sets_what_is_nested_too_deep, "nested more than 60 deep"),
        ],
    )
    def test_what_the_scheduler_does_not_take_is_an_error_where_it_was_given(self, objective: Any, words: str) -> None:
        """And not a replica that is started again and again."""
        made = study()
        with pytest.raises((TypeError, ValueError, InvalidTraining), match=words) as caught:
            optimize(made, objective, n_trials=1)
        assert f"in {objective.__name__}" in caught.value.__notes__[0]

    def test_integers_of_any_size_arrive_as_they_are(self) -> None:
        made = study()
        optimize(made, objectives.sets_large_integers, n_trials=1)
        assert made.trials[0].user_attrs["value"] == [2**63, {"a": -(2**70)}]
        assert made.trials[0].value == float(2**63)

    def test_a_bad_distribution_raises_optunas_error(self) -> None:
        with pytest.raises(ValueError, match="low"):
            optimize(study(), objectives.bad_distribution, n_trials=1)

    def test_queued_trials_run_once_each_with_several_jobs(self, tmp_path: Path) -> None:
        made = study(storage=f"sqlite:///{tmp_path / 'study.db'}")
        for number in range(8):
            made.enqueue_trial({"x": float(number), "y": 0, "kind": "b"})
        seen: list[int] = []
        optimize(
            made,
            objectives.quadratic,
            n_trials=8,
            n_jobs=-1,
            callbacks=[lambda study, trial: seen.append(trial.number)],
        )
        assert sorted(seen) == list(range(8))
        assert [trial.params["x"] for trial in made.trials] == list(range(8)) and made.best_value == 0.0
        assert "ask" not in vars(made)

    @pytest.mark.parametrize("in_the_body", [False, True])
    def test_a_killed_data_worker_costs_a_replica_and_not_the_trial(self, tmp_path: Path, in_the_body: bool) -> None:
        made = study()
        made.enqueue_trial({"in_the_body": in_the_body})
        environ = {"KILL_ONCE": str(tmp_path / "killed")}
        optimize(made, objectives.loses_a_data_worker, n_trials=1, max_replicas=1, environ=environ)
        [trial] = made.trials
        assert (tmp_path / "killed").exists()
        assert trial.state is COMPLETE
        assert trial.value == 2.0
        assert sorted(trial.intermediate_values) == [0, 1]

    def test_every_rank_of_every_incarnation_gets_the_same_parameters(self, tmp_path: Path) -> None:
        made = study(storage=f"sqlite:///{tmp_path / 'study.db'}")
        environ = {"NOTES": str(tmp_path), "KILL_ONCE": str(tmp_path / "killed"), "EPOCHS": "8"}
        optimize(made, objectives.trains, n_trials=1, min_replicas=2, environ=environ)
        [trial] = made.trials
        assert trial.state is COMPLETE
        assert sorted(trial.intermediate_values) == list(range(8))
        lines = [line.split() for path in tmp_path.glob("*.txt") for line in path.read_text().splitlines()]
        assert {(float(rate), float(momentum)) for _, _, rate, momentum in lines} == {
            (trial.params["lr"], trial.params["momentum"])
        }
        assert len(list(tmp_path.glob("*.txt"))) >= 3
        assert (tmp_path / "killed").exists()


@pytest.mark.parametrize(
    "pruner",
    [pytest.param(optuna.pruners.NopPruner(), marks=pytest.mark.slow), optuna.pruners.ThresholdPruner(upper=1e9)],
)
def test_a_trial_that_grows_goes_on_reporting(pruner: Any, scheduler: Any) -> None:
    """One that has joined reports as the others do: by itself, or together with them."""
    made = study(pruner=pruner)
    optimize(made, objectives.reports_until_it_has_grown, n_trials=2, n_jobs=2, max_replicas=2)
    grown = made.trials[1]
    assert (grown.state, grown.value) == (COMPLETE, 2.0)
    assert grown.intermediate_values == {step: float(step) for step in range(len(grown.intermediate_values))}
    key = made.user_attrs["elastune:study"]
    [record] = [
        each
        for each in scheduler.request("GET", "/rows")["trials"]
        if each["study"].endswith(key) and each["number"] == 1
    ]
    assert record["step"] == max(grown.intermediate_values)


def test_on_emulated_devices_steps_take_as_long_as_their_profile_says(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("ELASTUNE_URL", raising=False)
    made = study()
    devices = "2x1:resnet18-cifar10@2"
    optimize(
        made, objectives.tells_its_step_times, n_trials=1, min_replicas=2, emulate=devices, state_dir=tmp_path / "state"
    )
    assert "devices are emulated: 2 nodes of 1 slot" in capsys.readouterr().err
    rows = [Observation.from_row(row) for row in made.trials[0].user_attrs["observations"]]
    assert rows
    params = speed_profile("resnet18-cifar10@2").params
    for row in rows:
        nodes, replicas, atomic, *_ = row.configuration
        assert (nodes, replicas) == (2, 2)
        assert row.optim_seconds > 0.99 * optim_seconds(params, nodes, replicas, atomic)
        assert row.gradient_seconds == pytest.approx(float(gradient_seconds(params, atomic)))


@pytest.mark.usefixtures("scheduler")
def test_trials_take_as_many_slots_for_a_replica_as_their_models_need() -> None:
    made = study(sampler=optuna.samplers.GridSampler({"width": [16, 160]}, seed=0))
    objective = larger_objectives.takes_the_slots_that_it_needs
    optimize(made, objective, n_trials=2, slots_per_replica=(1, 2), max_replicas=1)
    assert {trial.params["width"]: trial.value for trial in made.trials} == {16: 1.0, 160: 2.0}


@pytest.mark.parametrize(
    ("objective", "options", "error", "words"),
    [
        (None, {}, InvalidSweep, "the objective is None"),
        (threading.Thread, {}, InvalidSweep, "the objective is the class Thread"),
        ([objectives.quadratic], {}, InvalidSweep, r"the objective is \[<function quadratic"),
        (objectives.quadratic, {"n_trials": "5"}, InvalidSweep, "n_trials is '5'; it must be an integer of at least 0"),
        (objectives.quadratic, {"timeout": "10"}, InvalidSweep, "timeout is '10'; it must be a number of seconds of"),
        (objectives.quadratic, {"min_replicas": 3, "max_replicas": 2}, InvalidTrialSpec, "must not exceed"),
        (objectives.quadratic, {"min_replicas": 0}, InvalidTrialSpec, "at least 1"),
        (objectives.quadratic, {"n_jobs": 0}, InvalidSweep, "n_jobs is 0"),
        (objectives.quadratic, {"slots": 0}, InvalidSweep, "slots is 0"),
        (
            objectives.quadratic,
            {"emulate": "many"},
            InvalidSweep,
            "emulated devices are 'many'; they must have the form",
        ),
        (objectives.quadratic, {"emulate": "1x2", "slots": 2}, InvalidSweep, "leave one out"),
        (
            objectives.quadratic,
            {"memory_per_slot": 0},
            InvalidSweep,
            "memory_per_slot is 0; it must be a number of GiB of",
        ),
        (objectives.quadratic, {"slots_per_replica": (2, 0)}, InvalidTrialSpec, r"slots_per_replica is \(2, 0\)"),
        (objectives.quadratic, {"slots_per_replica": ()}, InvalidTrialSpec, "or a list of at most"),
        (objectives.quadratic, {"resume": True}, InvalidSweep, "this one is in memory"),
    ],
)
def test_a_sweep_that_cannot_run_is_refused_at_once(
    objective: Any, options: dict[str, Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        optimize(study(), objective, **{"n_trials": 1, **options})


def test_more_replicas_than_slots_are_refused(scheduler: Any) -> None:
    with pytest.raises(InvalidSweep, match="min_replicas is 3 but there are 2 slots"):
        optimize(study(), objectives.quadratic, n_trials=1, min_replicas=3)
    with pytest.raises(InvalidSweep, match="ELASTUNE_URL names a scheduler"):
        optimize(study(), objectives.quadratic, n_trials=1, slots=4)
    with pytest.raises(InvalidSweep, match="emulate='1x4' was given, but ELASTUNE_URL"):
        optimize(study(), objectives.quadratic, n_trials=1, emulate="1x4")
    assert not math.isnan(scheduler.request("GET", "/overview")["now"])


def test_an_address_without_a_scheduler_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ELASTUNE_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("ELASTUNE_TOKEN", "x" * 20)
    with pytest.raises(SchedulerUnreachable, match=r"no scheduler answers at http://127\.0\.0\.1:9"):
        optimize(study(), objectives.quadratic, n_trials=1)
    monkeypatch.delenv("ELASTUNE_TOKEN")
    with pytest.raises(SchedulerUnreachable, match="no scheduler answers"):
        optimize(study(), objectives.quadratic, n_trials=1)


@pytest.mark.parametrize("how", ["optimize", pytest.param("elastic", marks=pytest.mark.slow)])
def test_a_scheduler_that_is_lost_ends_the_sweep_and_burns_no_trials(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    monkeypatch.setattr("tuner_bridge.driving.study_driver.UNREACHABLE_SECONDS", 1.0)
    embedded = EmbeddedScheduler(tmp_path / "state", slots=1, fork_server=False)
    client = embedded.start()
    monkeypatch.setenv("ELASTUNE_URL", client.url)
    monkeypatch.setenv("ELASTUNE_TOKEN", client.token)
    made = study(storage=f"sqlite:///{tmp_path / 'study.db'}")

    def kill(*_: Any) -> None:
        assert embedded.pid is not None
        os.kill(embedded.pid, signal.SIGKILL)

    def sweep() -> None:
        if how == "optimize":
            optimize(made, objectives.naps, n_trials=20, catch=(Exception,), callbacks=[kill])
        else:
            with elastic(objectives.naps) as objective:
                made.optimize(objective, n_trials=20, callbacks=[kill])

    with pytest.raises(SchedulerUnreachable):
        sweep()
    assert len(made.trials) == 2
    if how == "optimize":
        assert [trial.state.name for trial in made.trials] == ["COMPLETE", "RUNNING"]
    client.close()
    embedded.stop()


def test_interrupted_trials_are_finished_even_if_others_were_run_since(tmp_path: Path, scheduler: Any) -> None:
    made = study(storage=f"sqlite:///{tmp_path / 'study.db'}")
    interrupted = made.ask()
    interrupted.set_user_attr("elastune:trial", "left behind")
    optimize(made, objectives.quadratic, n_trials=2)
    assert made.trials[0].state is optuna.trial.TrialState.RUNNING
    optimize(made, objectives.quadratic, n_trials=2, resume=True)
    assert [trial.state for trial in made.trials] == [COMPLETE] * 3
    # A study that is over has nothing left to do.
    optimize(made, objectives.quadratic, n_trials=3, resume=True)
    assert len(made.trials) == 3


def test_a_wrong_or_missing_token_is_refused(scheduler: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ELASTUNE_TOKEN")
    with pytest.raises(NotAuthorized, match="set ELASTUNE_TOKEN"):
        optimize(study(), objectives.quadratic, n_trials=1)
    monkeypatch.setenv("ELASTUNE_TOKEN", "not the right one")
    with pytest.raises(NotAuthorized, match=scheduler.url):
        optimize(study(), objectives.quadratic, n_trials=1)


def test_what_is_asked_for_a_study_reaches_the_scheduler(scheduler: Any, caplog: pytest.LogCaptureFixture) -> None:
    made = study(study_name="asked for")
    terms = StudyTerms(weight=2.0, goal="makespan", yields_to=("nobody",))
    optimize(made, objectives.quadratic, n_trials=1, terms=terms)
    [found] = [each for each in scheduler.request("GET", "/studies") if each["title"] == "asked for"]
    assert found["name"].startswith("asked-for-")
    assert (found["weight"], found["goal"], found["quota"]) == (2.0, "makespan", None)
    assert "yields_to names 'nobody', but there is no such study" in caplog.text


def test_inside_a_replica_a_sweep_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ELASTUNE_API", "http://x")
    # Other tests may have run a sweep's code in this process.
    monkeypatch.setattr("tuner_bridge.in_replica.shipped._kept", {})
    with pytest.raises(InvalidSweep, match="__main__"):
        optimize(study(), objectives.quadratic, n_trials=1)
