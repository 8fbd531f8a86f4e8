"""NNI experiments whose manager, driver, replicas or terminal go away."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

import psutil
import pytest

from tests.support.nni_experiment import NniExperiment
from tests.support.nni_scripts import x_of
from tests.support.tracked import of_mlflow, of_tensorboard

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

TRAINS = """
import os, time
import nni
import torch
from torch.utils.data import TensorDataset
from dist_core import AdaptiveDataLoader, AdaptiveDataParallel, rank, remaining_epochs_until, world_size

rate = nni.get_next_parameter()["x"]
data = torch.randn(256, 4, generator=torch.Generator().manual_seed(1))
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01 + 0.01 * rate)
loader = AdaptiveDataLoader(TensorDataset(data, data.sum(dim=1)), batch_size=16, shuffle=True)
wrapped = AdaptiveDataParallel(model, optimizer)
for epoch in remaining_epochs_until(int(os.environ.get("EPOCHS", "12"))):
    while epoch == 5 and os.path.exists(os.environ.get("HELD_BY", "")):
        time.sleep(0.05)
    for inputs, target in loader:
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(wrapped(inputs).squeeze(1), target)
        loss.backward()
        optimizer.step()
        time.sleep(float(os.environ.get("STEP_SECONDS", "0.01")) * len(inputs) / 16)
        with open(f"{os.environ['NOTES']}/{os.getpid()}", "a") as notes:
            notes.write(f"{world_size()}:{rank()} ")
    if rank() == 0 or "RANK_0_ONLY" not in os.environ:
        nni.report_intermediate_result({"default": float(loss), "epoch": epoch})
nni.report_final_result(float(loss))
"""


DICTIONARIES = """
import nni
x = nni.get_next_parameter()["x"]
nni.report_intermediate_result({"default": x, "other": [1, "two"]})
nni.report_final_result({"default": x + 1, "other": None})
"""


@pytest.mark.filterwarnings("ignore")
def test_a_stopped_experiment_resumes_with_the_same_trials(experiment: Callable[..., NniExperiment]) -> None:
    """And each of its trials is one run where it is tracked, as an Optuna study's are."""
    made = experiment(TRAINS, {"maxReplicas": 1}, maxTrialNumber=3)
    made.config["experimentName"] = "tracked"
    made.config["trainingService"]["trackers"] = [
        {"name": "MLflow", "classArgs": {"tracking_uri": f"sqlite:///{made.folder}/mlflow.db"}},
        # Beside the configuration, as NNI takes paths.
        {"name": "TensorBoard", "classArgs": {"folder": "tensorboard"}},
    ]
    _train_until_both_have_reported(made, 3)
    before = {trial["trialJobId"]: made.results(trial["trialJobId"]) for trial in made.trials()}
    made.nnictl("stop", made.id)
    made.again()
    made.until_done(200.0)
    assert made.states() == ["SUCCEEDED"] * 3
    for trial in made.trials():
        results = made.results(trial["trialJobId"])
        assert [(kind, sequence) for kind, sequence, _ in results] == [
            *(("PERIODICAL", number) for number in range(10)),
            ("FINAL", 0),
        ]
        assert [value["epoch"] for kind, _, value in results if kind == "PERIODICAL"] == list(range(10))
        earlier = before.get(trial["trialJobId"], [])
        assert results[: len(earlier)] == earlier
    trials = made.trials()
    told = [made.results(trial["trialJobId"]) for trial in trials]
    made.nnictl("stop", made.id)
    for read in (of_mlflow, of_tensorboard):
        for trial, results, run in zip(trials, told, read(made.folder), strict=True):
            assert run.state == "complete"
            assert float(run.parameters["x"]) == pytest.approx(x_of(trial), rel=1e-5)
            losses = {number: value["default"] for kind, number, value in results if kind == "PERIODICAL"}
            assert [step for step, _ in run.series["objective"]] == list(range(10))
            assert dict(run.series["objective"]) == pytest.approx(losses, rel=1e-5)
            assert run.series["value"][0][1] == pytest.approx(results[-1][2], rel=1e-5)
            assert "its first replicas are training" in run.history or "trains" in run.history


def _train_until_both_have_reported(made: NniExperiment, count: int) -> None:
    """However long after the first one the second trial begins, neither is over by then."""
    held_by = made.notes.parent / "held"
    held_by.touch()
    made.environ |= {"STEP_SECONDS": "0.05", "EPOCHS": "10", "HELD_BY": str(held_by)}
    made.create()
    made.until(lambda: _reported(made, count), "both trials to have trained")
    held_by.unlink()
    # Of replicas that begin from now on.
    made.environ["STEP_SECONDS"] = "0.005"


def _reported(made: NniExperiment, count: int) -> bool:
    return len(made.trials()) >= 2 and all(len(made.results(t["trialJobId"])) >= count for t in made.trials()[:2])


def test_trials_of_a_killed_manager_are_adopted_when_the_experiment_resumes(
    experiment: Callable[..., NniExperiment],
) -> None:
    """NNI's manager takes 10 s for each start, and is started twice."""
    made = experiment(TRAINS, {"maxReplicas": 1}, maxTrialNumber=3)
    _train_until_both_have_reported(made, 3)
    before = {trial["trialJobId"]: made.results(trial["trialJobId"]) for trial in made.trials()}
    driver = made.driver()
    made.kill_manager()
    driver.wait(timeout=60.0)
    made.again()
    made.until_done(200.0)
    assert made.states() == ["SUCCEEDED"] * 3
    for trial in made.trials():
        results = made.results(trial["trialJobId"])
        assert [value["epoch"] for kind, _, value in results if kind == "PERIODICAL"] == list(range(10))
        assert results[-1][0] == "FINAL"
        earlier = before.get(trial["trialJobId"], [])
        assert results[: len(earlier)] == earlier


def test_a_killed_driver_and_a_lost_replica_cost_no_trial(experiment: Callable[..., NniExperiment]) -> None:
    """NNI's manager takes 10 s to start, and its experiment goes on behind two losses."""
    made = experiment(TRAINS, {"maxReplicas": 1}, maxTrialNumber=2)
    _train_until_both_have_reported(made, 2)
    [lost, *_] = [int(path.name) for path in made.notes.iterdir()]
    os.kill(lost, signal.SIGKILL)
    made.until(lambda: _reported(made, 4), "it to go on")
    made.driver().kill()
    made.until_done(200.0)
    assert made.states() == ["SUCCEEDED"] * 2
    for trial in made.trials():
        epochs = [value["epoch"] for kind, _, value in made.results(trial["trialJobId"]) if kind == "PERIODICAL"]
        assert epochs == list(range(10))


def test_a_trial_grows_when_another_ends_and_reports_once(experiment: Callable[..., NniExperiment]) -> None:
    """NNI's manager takes 10 s to start, and one trial has to end before another grows."""
    made = experiment(TRAINS, {"minReplicas": 1, "maxReplicas": 2}, maxTrialNumber=1, trialConcurrency=1)
    made.environ |= {"STEP_SECONDS": "0.1", "EPOCHS": "14"}
    made.create()
    made.until_done(200.0)
    [trial] = made.trials()
    results = made.results(trial["trialJobId"])
    assert [value["epoch"] for kind, _, value in results if kind == "PERIODICAL"] == list(range(14))
    sizes = {note.split(":")[0] for path in made.notes.iterdir() for note in path.read_text().split()}
    assert "2" in sizes


def test_results_go_on_when_the_only_reporting_rank_is_lost(experiment: Callable[..., NniExperiment]) -> None:
    """NNI's manager takes 10 s to start, and a lost replica is noticed and replaced."""
    made = experiment(TRAINS, {"minReplicas": 2, "maxReplicas": 2}, maxTrialNumber=1, trialConcurrency=1)
    made.environ |= {"STEP_SECONDS": "0.1", "EPOCHS": "10", "RANK_0_ONLY": "1"}
    made.create()

    def reporter() -> list[int]:
        return [int(path.name) for path in made.notes.iterdir() if path.read_text().split()[-1:] == ["2:0"]]

    made.until(lambda: bool(made.trials()) and len(made.results(made.trials()[0]["trialJobId"])) >= 4, "results")
    [lost] = reporter()
    os.kill(lost, signal.SIGKILL)
    made.until_done(200.0)
    [trial] = made.trials()
    assert trial["status"] == "SUCCEEDED"
    results = made.results(trial["trialJobId"])
    assert [sequence for kind, sequence, _ in results if kind == "PERIODICAL"] == list(range(10))
    assert [value["epoch"] for kind, _, value in results if kind == "PERIODICAL"] == list(range(10))


def test_in_the_foreground_an_interrupt_ends_everything(experiment: Callable[..., NniExperiment]) -> None:
    # NNI ends by itself some seconds after the last trial: the third one stays.
    """NNI's manager takes 10 s to start, and as long to end."""
    stays = "if nni.get_sequence_id() == 2:\n    import time\n    time.sleep(600)\n"
    made = experiment(DICTIONARIES + stays, maxTrialNumber=3)
    process = made.create_in_foreground()
    try:
        made.until(lambda: made.states().count("SUCCEEDED") >= 2, "two trials", 90.0)
        for trial in [each for each in made.trials() if each["status"] == "SUCCEEDED"][:2]:
            x = x_of(trial)
            assert made.results(trial["trialJobId"]) == [
                ("PERIODICAL", 0, {"default": x, "other": [1, "two"]}),
                ("FINAL", 0, {"default": x + 1, "other": None}),
            ]
        drivers = [each for each in psutil.Process(process.pid).children(recursive=True) if _is_ours(each)]
        assert drivers
        process.send_signal(signal.SIGINT)
        process.wait(timeout=60.0)
        _, alive = psutil.wait_procs(drivers, timeout=30.0)
        assert not alive
    finally:
        process.kill()


def _is_ours(process: psutil.Process) -> bool:
    try:
        words = process.cmdline()
    except psutil.Error:
        # Gone by now.
        return False
    return "tuner_bridge.nni.experiment_driver" in words or "scheduler.cli" in words
