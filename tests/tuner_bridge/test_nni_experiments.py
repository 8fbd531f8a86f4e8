"""What NNI's users do, on our platform: whole experiments with `nnictl`, NNI's manager and its REST interface."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import optuna
import pytest
import yaml

from scheduler.client.connection import SchedulerClient
from scheduler.host.embedded import EmbeddedScheduler
from tests.support import objectives
from tests.support.nni_experiment import NniExperiment
from tests.support.nni_scripts import REPORTS, x_of
from tests.support.project import ROOT
from tuner_bridge import optimize

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
pytest.importorskip("nni")


def expected(x: float, count: int = 6) -> list[tuple[str, int, Any]]:
    return [*(("PERIODICAL", step, x + step) for step in range(count)), ("FINAL", 0, x + 10)]


VALUES = [0.9, 0.8, 0.7, 0.01, 0.02]


def test_results_export_import_logs_and_view(experiment: Callable[..., NniExperiment]) -> None:
    """NNI's manager takes 10 s for each start, and the experiment is viewed after it."""
    made = experiment()
    made.create()
    made.nnictl("experiment", "import", made.id, "-f", _imported(made.folder))
    made.until_done()
    trials = made.trials()
    assert [trial["status"] for trial in trials] == ["SUCCEEDED"] * 4
    for trial in trials:
        assert made.results(trial["trialJobId"]) == expected(x_of(trial))
        assert f"gets {x_of(trial)} as trial {trial['sequenceId']}" in made.rest(
            f"/trial-file/{trial['trialJobId']}/stdout"
        )
        assert trial["startTime"] <= trial["endTime"]
        assert (made.root / "trials" / trial["trialJobId"] / "trial.log").exists()
    assert {entry["trialJobId"] for entry in made.rest("/export-data")} == {trial["trialJobId"] for trial in trials}
    exported = made.folder / "exported.json"
    made.nnictl("experiment", "export", made.id, "-f", str(exported), "-t", "json", "--intermediate")
    assert sorted(float(row["value"]) for row in json.loads(exported.read_text())) == sorted(
        x_of(trial) + 10 for trial in trials
    )
    assert len(made.rest("/experiment/imported-data")) == 1
    made.nnictl("stop", made.id)
    made.again("view")
    assert made.states() == ["SUCCEEDED"] * 4
    assert made.results(trials[0]["trialJobId"]) == expected(x_of(trials[0]))


def _imported(folder: Path) -> str:
    path = folder / "known.json"
    path.write_text(json.dumps([{"parameter": {"x": 0.5}, "value": 3.0}]))
    return str(path)


AT_ONCE = """
import nni
nni.report_final_result(nni.get_next_parameter()["x"])
"""


def test_no_trial_that_has_ended_is_left_running(experiment: Callable[..., NniExperiment]) -> None:
    """Trials that end while NNI writes that they have begun: it must not lose their end."""
    made = experiment(AT_ONCE, maxTrialNumber=15)
    made.create()
    made.until_done(200.0)
    assert made.states() == ["SUCCEEDED"] * 15


ENDS_HARD = """
import os
import nni
x = nni.get_next_parameter()["x"]
if nni.get_sequence_id() == 3:
    raise ValueError("on purpose")
nni.report_final_result(x)
nni.report_final_result(x + 1)
os._exit(0)
"""


def test_a_hard_exit_after_the_result_is_success_and_each_final_result_is_kept(
    experiment: Callable[..., NniExperiment],
) -> None:
    """As from NNI's own platform. One that fails before says why."""
    made = experiment(ENDS_HARD)
    made.create()
    made.until_done()
    assert sorted(made.states()) == ["FAILED", *["SUCCEEDED"] * 3]
    [failed] = [trial for trial in made.trials() if trial["status"] == "FAILED"]
    assert "ValueError: on purpose" in made.rest(f"/trial-file/{failed['trialJobId']}/stderr")
    for trial in made.trials():
        if trial["trialJobId"] == failed["trialJobId"]:
            continue
        x = x_of(trial)
        assert made.results(trial["trialJobId"]) == [("FINAL", 0, x), ("FINAL", 0, x + 1)]


def test_waiting_and_running_trials_show_as_such_and_can_be_cancelled(
    experiment: Callable[..., NniExperiment],
) -> None:
    """NNI's manager takes 10 s to start."""
    made = experiment(service={"slots": 1})
    # Long enough to be seen running even where `nnictl create` takes a while to return.
    made.environ["STEP_SECONDS"] = "20"
    made.create()
    made.until(lambda: made.states() == ["RUNNING", "WAITING"], "one trial to run and one to wait")
    running, waiting = (trial["trialJobId"] for trial in made.trials())
    made.rest(f"/trial-jobs/{waiting}", "DELETE")
    made.until(lambda: made.states()[1] == "USER_CANCELED", "the waiting trial to be cancelled")
    made.rest(f"/trial-jobs/{running}", "DELETE")
    made.until(lambda: made.states()[0] == "USER_CANCELED", "the running trial to be cancelled")
    made.until(lambda: made.states()[2:] == ["RUNNING", "WAITING"], "the next ones")


def test_trials_that_the_assessor_stops_are_early_stopped(experiment: Callable[..., NniExperiment]) -> None:
    """NNI's manager takes 10 s to start."""
    code = """
import time
import nni
x = nni.get_next_parameter()["x"]
for step in range(20):
    time.sleep(0.2)
    nni.report_intermediate_result(x * (1.0 - 0.5 ** (step + 1)))
nni.report_final_result(x)
"""
    made = experiment(
        code,
        trialConcurrency=1,
        maxTrialNumber=len(VALUES),
        searchSpace={"combine_params": {"_type": "choice", "_value": [{"x": x} for x in VALUES]}},
        tuner={"name": "BatchTuner"},
        assessor={"name": "Medianstop", "classArgs": {"optimize_mode": "maximize", "start_step": 2}},
    )
    made.create()
    made.until_done(200.0)
    states = made.states()
    assert set(states) <= {"SUCCEEDED", "EARLY_STOPPED"}
    assert states[0] == "SUCCEEDED"
    assert "EARLY_STOPPED" in states
    for trial in made.trials():
        sequences = [sequence for kind, sequence, _ in made.results(trial["trialJobId"]) if kind == "PERIODICAL"]
        assert sequences == list(range(len(sequences)))


def test_other_commands_run_as_they_are(experiment: Callable[..., NniExperiment]) -> None:
    """NNI's manager takes 10 s to start."""
    shell = experiment(maxTrialNumber=2, trialCommand="cd . && exec python3 trial.py > said.txt")
    shell.create()
    shell.until_done()
    assert shell.states() == ["SUCCEEDED"] * 2
    for trial in shell.trials():
        assert shell.results(trial["trialJobId"]) == expected(x_of(trial))
    assert "gets" in (shell.code / "said.txt").read_text()


LOADED = """
import sys
from nni.experiment.config import ExperimentConfig
for path in sys.argv[1:]:
    try:
        ExperimentConfig.load(path).canonical_copy()
        print("accepted")
    except Exception as error:
        print(repr(error))
"""
"""What `nnictl create` does with a configuration before anything else."""


def test_a_configuration_that_cannot_work_is_refused(experiment: Callable[..., NniExperiment]) -> None:
    made = experiment(service={"minReplicas": 3})
    expected: list[tuple[Path, str]] = []
    for service, words in (
        ({"slots": 2, "minReplicas": 3}, "minReplicas is 3 but there are 2 slots"),
        ({"slots": 2, "minReplicas": 2, "maxReplicas": 1}, "min_replicas is 2 but max_replicas is 1"),
        ({"slots": 2, "schedulerUrl": "http://127.0.0.1:1"}, "schedulerUrl names a scheduler"),
        ({"weight": -1.0}, "weight is -1.0; it must be from 1e-06"),
        ({"maxWrokers": 3}, "maxwrokers"),
        ({"trialGpuNumber": 2}, "a slot is one GPU"),
    ):
        path = made.folder / f"config-{len(expected)}.yml"
        path.write_text(yaml.safe_dump({**made.config, "trainingService": {"platform": "tuner_bridge", **service}}))
        expected.append((path, words))
    *loaded, (path, words) = expected
    said = made.run("-c", LOADED, *(str(path) for path, _ in loaded)).splitlines()
    assert [words for (_, words), told in zip(loaded, said, strict=True) if words not in told] == [], said
    with pytest.raises(AssertionError, match=words):
        made.nnictl("create", "--config", str(path))


def test_other_platforms_of_the_environment_still_work(experiment: Callable[..., NniExperiment]) -> None:
    """NNI's manager takes 10 s to start."""
    made = experiment(maxTrialNumber=1)
    made.config["trainingService"] = {"platform": "local"}
    made.create()
    made.until_done()
    assert made.states() == ["SUCCEEDED"]


def test_a_study_and_an_experiment_share_one_scheduler(
    experiment: Callable[..., NniExperiment], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NNI's manager starts, and a sweep runs beside its experiment."""
    shared = EmbeddedScheduler(tmp_path / "shared", slots=2)
    client: SchedulerClient = shared.start()
    monkeypatch.setenv("ELASTUNE_URL", client.url)
    monkeypatch.setenv("ELASTUNE_TOKEN", client.token)
    # Its trials have the scheduler's environment, and are to be seen running.
    made = experiment(REPORTS.replace("0.05", "0.5"), maxTrialNumber=6)
    made.environ |= {"ELASTUNE_URL": client.url, "ELASTUNE_TOKEN": client.token}
    made.config["experimentName"] = "digits"
    made.config["trainingService"] = {"platform": "tuner_bridge", "weight": 2, "priority": 1, "yieldsTo": ["beside"]}
    made.create()
    made.until(lambda: "RUNNING" in made.states(), "a trial to run")
    study = optuna.create_study(study_name="beside")
    optimize(study, objectives.naps, n_trials=4, n_jobs=2)
    found = {each["name"]: each for each in client.request("GET", "/studies")}
    assert found[f"nni-{made.id}"]["weight"] == 2.0
    assert found[f"nni-{made.id}"]["priority"] == 1
    assert found[f"nni-{made.id}"]["yields_to"] == ["beside"]
    made.until(lambda: len(made.trials()) >= 3, "more trials")
    made.run("-m", "scheduler.cli", "set", "digits", "--weight", "3")
    assert {e["name"]: e for e in client.request("GET", "/studies")}[f"nni-{made.id}"]["weight"] == 3.0
    listed = made.run("-m", "scheduler.cli", "ls")
    assert "beside/0" in listed
    assert "digits/0" in listed
    assert f"nni-{made.id}" in made.run("-m", "scheduler.cli", "studies")
    made.until_done()
    assert made.states() == ["SUCCEEDED"] * 6
    rows = [row for row in client.request("GET", "/rows")["trials"] if row["title"] == "digits"]
    assert len(rows) == 6
    assert all(set(row["parameters"]) == set(made.config["searchSpace"]) for row in rows)
    made.nnictl("stop", made.id)
    client.close()
    shared.stop()


def test_the_example_runs_as_it_is_written(experiment: Callable[..., NniExperiment]) -> None:
    """NNI's manager takes 10 s to start."""
    folder = ROOT / "examples" / "nni_experiment"
    config = yaml.safe_load((folder / "experiment.yml").read_text())
    service = config.pop("trainingService")
    assert config.pop("trialCodeDirectory") == "."
    made = experiment((folder / "trial.py").read_text(), service, **config)
    made.create()
    made.until_done()
    assert made.states() == ["SUCCEEDED"] * 6
    for trial in made.trials():
        kinds = [kind for kind, _, _ in made.results(trial["trialJobId"])]
        assert kinds == ["PERIODICAL"] * 6 + ["FINAL"]


def test_nnis_population_based_tuner_hands_checkpoints_from_generation_to_generation(
    experiment: Callable[..., NniExperiment],
) -> None:
    """The published example, smaller: three members of three generations, whose folders the tuner names."""
    folder = ROOT / "examples" / "nni_population"
    config = yaml.safe_load((folder / "experiment.yml").read_text())
    made = experiment((folder / "trial.py").read_text(), service={"slots": 2})
    kept = made.folder / "kept"
    made.config |= {key: config[key] for key in ("trialCommand", "searchSpace")}
    arguments = {**config["tuner"]["classArgs"], "all_checkpoint_dir": str(kept), "population_size": 3}
    made.config |= {
        "tuner": {**config["tuner"], "classArgs": arguments},
        "maxTrialNumber": 9,
        "trialConcurrency": 3,
    }
    made.create()
    made.until_done(250.0)
    assert made.states() == ["SUCCEEDED"] * 9
    by_parent: dict[str, list[dict[str, Any]]] = {}
    values = {}
    for trial in made.trials():
        parameters = json.loads(trial["hyperParameters"][0])["parameters"]
        assert (Path(parameters["save_checkpoint_dir"]) / "model.pth").exists()
        values[parameters["save_checkpoint_dir"]] = float(json.loads(json.loads(trial["finalMetricData"][0]["data"])))
        by_parent.setdefault(parameters["load_checkpoint_dir"], []).append(parameters)
    later = {parent: found for parent, found in by_parent.items() if parent in values and Path(parent).name != "0"}
    assert later, "the third generation begins with checkpoints of the second"
    assert any(len(found) == 2 for found in by_parent.values()), "a loser begins with the checkpoint of a winner"
