"""Trackers have one run a trial, with its parameters, reports, resizes and end, however many replicas it had."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import optuna
import pytest

from tests.support import objectives, tracked_code
from tests.support.tracked import trackers_in
from tuner_bridge import optimize
from tuner_bridge.errors import InvalidSweep
from tuner_bridge.trackers import TrialIdentity
from tuner_bridge.trackers.base import imported
from tuner_bridge.trackers.tracked_trial import TrackedTrial

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300), pytest.mark.filterwarnings("ignore")]
"""Importing these libraries takes longer than most tests, and they warn of each other."""


KINDS = pytest.mark.parametrize("kind", ["mlflow", "tensorboard", "wandb"])


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WANDB_MODE", "offline")
    return tmp_path


@KINDS
def test_a_tracker_has_what_it_was_told(folder: Path, kind: str) -> None:
    tracker, read = trackers_in(folder)[kind]
    for number, state in enumerate(("complete", "pruned", "fail")):
        tracked = TrackedTrial([tracker], "study", "study-1234", number, {})
        tracked.parameter("rate", 0.25)
        tracked.parameter("kind", "a")
        tracked.report(2.0, 1)
        tracked.report(float("nan"), 2)
        tracked.report(1.5, 3)
        tracked.live({"replicas": 1, "goodput": None, "batch": 8})
        tracked.live({"replicas": 3, "goodput": 7.5, "batch": 8})
        tracked.live({"replicas": 3, "goodput": 7.5, "batch": 8})
        tracked.end(state, [0.5, 4.0] if state == "complete" else None, ["began", "grew"])
    found = read(folder)
    assert [each.state for each in found] == ["complete", "pruned", "fail"]
    for each in found:
        if kind != "tensorboard" or each.state == "complete":
            assert each.parameters["rate"] == "0.25" and each.parameters["kind"] == "a"
        assert each.series["objective"] == [(1, 2.0), (3, 1.5)]
        assert [value for _, value in each.series["elastune/replicas"]] == [1.0, 3.0]
        assert [value for _, value in each.series["elastune/goodput"]] == [7.5]
        assert [value for _, value in each.series["elastune/batch_size"]] == [8.0]
        assert "began" in each.history and "grew" in each.history
    assert [found[0].series[name][0][1] for name in ("value", "value_1")] == [0.5, 4.0]


def test_a_run_is_found_again_when_its_sweep_is_resumed(folder: Path) -> None:
    tracker, read = trackers_in(folder)["mlflow"]
    first = TrackedTrial([tracker], "study", "study-1234", 0, {})
    first.report(2.0, 0)
    first.leave()
    second = TrackedTrial([tracker], "study", "study-1234", 0, first.identities)
    second.report(1.0, 1)
    second.end("complete", [1.0], [])
    [found] = read(folder)
    assert found.series["objective"] == [(0, 2.0), (1, 1.0)]


class Broken:
    name = "broken"

    def begin(self, trial: TrialIdentity) -> Any:
        raise OSError("no line to it")


class BreaksLater:
    name = "breaks later"
    identity, environ = "x", {"A": "b"}  # as a run has them

    def begin(self, trial: TrialIdentity) -> Any:
        return self

    def report(self, value: float, step: int) -> None:
        raise OSError("gone")


def test_a_tracker_that_fails_ends_no_trial(caplog: pytest.LogCaptureFixture) -> None:
    tracked = TrackedTrial([Broken(), BreaksLater()], "study", "key", 4, {})
    assert tracked.environ == {"A": "b"}
    tracked.report(1.0, 0)
    tracked.report(1.0, 1)
    tracked.end("complete", [1.0], [])
    assert [record.message for record in caplog.records] == [
        "trial 4 is no longer tracked by broken: OSError: no line to it",
        "trial 4 is no longer tracked by breaks later: OSError: gone",
    ]


def test_what_is_not_installed_is_said() -> None:
    with pytest.raises(InvalidSweep, match="X needs the package nowhere, which cannot be imported"):
        imported("nowhere_at_all", "nowhere", "X")


def test_a_sweep_has_one_run_a_trial(folder: Path) -> None:
    """Of trials that grow while they train, and log by themselves on the first replica."""
    several = trackers_in(folder)
    study = optuna.create_study(study_name="tracked", sampler=optuna.samplers.RandomSampler(seed=0))
    for kind in tracked_code.EPOCHS:
        study.enqueue_trial({"kind": kind})
    optimize(
        study,
        tracked_code.objective,
        n_trials=2,
        n_jobs=2,
        slots=2,
        state_dir=folder / "state",
        trackers=[tracker for tracker, _ in several.values()],
    )
    for kind, (_, read) in several.items():
        found = read(folder)
        assert len(found) == 2, kind
        # The long one may have both slots once the short one is over, as long as that pays on the machine of then.
        replicas = [value for _, value in found[1].series["elastune/replicas"]]
        assert replicas and set(replicas) <= {1.0, 2.0}, replicas
        assert all(before != after for before, after in pairwise(replicas)), "each change is told of once"
        assert found[1].series["elastune/goodput"]
        for trial, run in zip(study.trials, found, strict=True):
            assert run.state == "complete"
            assert float(run.parameters["rate"]) == pytest.approx(trial.params["rate"], rel=1e-5)
            assert run.parameters["kind"] == trial.params["kind"]
            reported = dict(run.series["objective"])
            assert reported == pytest.approx(trial.intermediate_values, rel=1e-5)
            assert len(run.series["objective"]) == len(trial.intermediate_values)
            assert run.series["value"][0][1] == pytest.approx(trial.value, rel=1e-5)
            assert "its first replicas are training" in run.history
        if kind == "mlflow":
            for trial, run in zip(study.trials, found, strict=True):
                epochs = range(tracked_code.EPOCHS[trial.params["kind"]])
                assert run.series["own"] == [(epoch, float(epoch)) for epoch in epochs]


def test_trials_that_are_pruned_and_fail_are_told_as_such(folder: Path) -> None:
    tracker, read = trackers_in(folder)["mlflow"]
    study = optuna.create_study(pruner=optuna.pruners.MedianPruner(1), sampler=optuna.samplers.RandomSampler(seed=0))
    optimize(study, objectives.pruned_by_median, n_trials=4, slots=1, state_dir=folder / "state", trackers=[tracker])
    assert [run.state for run in read(folder)] == [trial.state.name.lower() for trial in study.trials]
