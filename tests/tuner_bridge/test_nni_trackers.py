"""An NNI experiment's trials are tracked as an Optuna study's are."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.nni_experiment import NniExperiment
from tests.support.nni_scripts import REPORTS, x_of
from tests.support.tracked import of_mlflow, of_tensorboard
from tuner_bridge.errors import InvalidSweep
from tuner_bridge.trackers import MLflow, TensorBoard, trackers_named

pytest.importorskip("nni")


def test_trackers_are_made_of_their_names(tmp_path: Path) -> None:
    one, other = trackers_named(
        [{"name": "MLflow", "classArgs": {"experiment": "e"}}, {"name": "TensorBoard", "classArgs": {"folder": "runs"}}]
    )
    assert isinstance(one, MLflow)
    assert isinstance(other, TensorBoard)


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        ({"name": "Tensorboard"}, "a tracker's name is 'Tensorboard'; choose one of MLflow, TensorBoard, Weights"),
        ({"name": "TensorBoard"}, "the tracker TensorBoard cannot be created with {}: missing 1 required .* 'folder'"),
        ({"name": "MLflow", "classArgs": {"uri": "x"}}, "unexpected keyword argument 'uri'"),
        ({"name": "MLflow", "folder": "x"}, "it must have a name, may have classArgs"),
        ({"classArgs": {}}, "it must have a name, may have classArgs"),
    ],
)
def test_what_is_no_tracker_is_said(entry: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidSweep, match=said):
        trackers_named([entry])


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.filterwarnings("ignore")
def test_an_experiment_that_resumes_has_one_run_a_trial(experiment: Callable[..., NniExperiment]) -> None:
    made = experiment(REPORTS, maxTrialNumber=3)
    made.config["experimentName"] = "tracked"
    made.config["trainingService"]["trackers"] = [
        {"name": "MLflow", "classArgs": {"tracking_uri": f"sqlite:///{made.folder}/mlflow.db"}},
        # Beside the configuration, as NNI takes paths.
        {"name": "TensorBoard", "classArgs": {"folder": "tensorboard"}},
    ]
    made.environ["STEP_SECONDS"] = "0.5"
    made.create()
    made.until(lambda: any(made.results(trial["trialJobId"]) for trial in made.trials()), "a result")
    made.nnictl("stop", made.id)
    made.again()
    made.until_done(200.0)
    trials = made.trials()
    assert [trial["status"] for trial in trials] == ["SUCCEEDED"] * 3
    made.nnictl("stop", made.id)
    for read in (of_mlflow, of_tensorboard):
        found = read(made.folder)
        assert len(found) == 3
        for trial, run in zip(trials, found, strict=True):
            x = x_of(trial)
            assert run.state == "complete"
            assert float(run.parameters["x"]) == pytest.approx(x, rel=1e-5)
            assert [step for step, _ in run.series["objective"]] == list(range(6))
            assert dict(run.series["objective"]) == pytest.approx({step: x + step for step in range(6)}, rel=1e-5)
            assert run.series["value"][0][1] == pytest.approx(x + 10, rel=1e-5)
            assert "its first replicas are training" in run.history or "trains" in run.history
