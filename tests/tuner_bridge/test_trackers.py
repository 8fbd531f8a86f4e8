"""Trackers have one run a trial, with its parameters, reports, resizes and end, however many replicas it had."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import optuna
import pytest

from tests.support import objectives, tracked_code
from tuner_bridge import optimize
from tuner_bridge.errors import InvalidSweep
from tuner_bridge.trackers import MLflow, TensorBoard, Tracker, TrialIdentity, WeightsAndBiases
from tuner_bridge.trackers.base import imported
from tuner_bridge.trackers.tracked_trial import TrackedTrial

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300), pytest.mark.filterwarnings("ignore")]
"""Importing these libraries takes longer than most tests, and they warn of each other."""


@dataclass
class Found:
    """What a tracker has of one trial."""

    parameters: dict[str, str] = field(default_factory=dict)
    series: dict[str, list[tuple[int, float]]] = field(default_factory=dict)
    """By name: step and value."""
    state: str = ""
    history: str = ""


def of_mlflow(folder: Path) -> list[Found]:
    import mlflow

    client = mlflow.MlflowClient(f"sqlite:///{folder}/mlflow.db")
    experiments = [each.experiment_id for each in client.search_experiments() if each.name != "Default"]
    found = []
    for run in sorted(client.search_runs(experiments), key=lambda each: int(each.data.tags["elastune.trial"])):
        series = {
            name: [(point.step, point.value) for point in client.get_metric_history(run.info.run_id, name)]
            for name in run.data.metrics
        }
        status = {"FINISHED": "complete", "KILLED": "pruned", "FAILED": "fail"}[run.info.status]
        found.append(Found(dict(run.data.params), series, status, run.data.tags.get("elastune.history", "")))
    return found


def of_tensorboard(folder: Path) -> list[Found]:
    return [_of_events(each) for each in sorted((folder / "tensorboard").iterdir())]


def _of_events(folder: Path) -> Found:
    from tensorboardX.proto import event_pb2, plugin_hparams_pb2

    found = Found()
    for path in sorted(folder.iterdir()):
        assert path.is_file()
        content = path.read_bytes()
        while content:
            (length,) = struct.unpack("<Q", content[:8])
            event = event_pb2.Event.FromString(content[12 : 12 + length])
            content = content[16 + length :]
            for value in event.summary.value:
                plugin = value.metadata.plugin_data
                if plugin.plugin_name == "hparams":
                    told = plugin_hparams_pb2.HParamsPluginData.FromString(plugin.content)
                    for name, given in told.session_start_info.hparams.items():
                        kind = given.WhichOneof("kind")
                        found.parameters[name] = str(getattr(given, kind))
                elif plugin.plugin_name == "text":
                    found.history = value.tensor.string_val[0].decode()
                    found.state = found.history.rpartition("ended: ")[2]
                else:
                    found.series.setdefault(value.tag, []).append((event.step, value.simple_value))
    return found


def of_wandb(folder: Path) -> list[Found]:
    from wandb.proto import wandb_internal_pb2

    kind: Any = wandb_internal_pb2
    trials: dict[int, Found] = {}
    for path in sorted((folder / "wandb" / "wandb").glob("offline-run-*/*.wandb")):
        found, number = Found(), -1
        for content in _log_records(path.read_bytes()):
            record = kind.Record.FromString(content)
            for item in record.run.config.update:
                found.parameters[item.key] = str(json.loads(item.value_json))
            if record.run.display_name:
                number = int(record.run.display_name.rpartition("-")[2])
            for item in record.config.update:
                found.parameters[item.key] = str(json.loads(item.value_json))
            row = {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
            step = int(row.get("step", row.get("elastune/seconds", 0)))
            for name, value in row.items():
                if not name.startswith("_"):
                    found.series.setdefault(name, []).append((step, value))
            for item in record.summary.update:
                key = item.key or "/".join(item.nested_key)
                if key == "elastune/state":
                    found.state = json.loads(item.value_json)
                elif key == "elastune/history":
                    found.history = json.loads(item.value_json)
                elif key.startswith("value"):
                    found.series[key] = [(0, json.loads(item.value_json))]
        assert number not in trials, "two runs of one trial"
        trials[number] = found
    return [trials[number] for number in sorted(trials)]


def _log_records(content: bytes, block: int = 32768) -> Iterator[bytes]:
    """Of a file in LevelDB's log format, behind the 7 bytes that W&B begins it with."""
    at, parts = 7, b""
    while at + 7 <= len(content):
        if block - at % block < 7:
            at += block - at % block
            continue
        length, form = struct.unpack("<HB", content[at + 4 : at + 7])
        parts += content[at + 7 : at + 7 + length]
        at += 7 + length
        if form in (1, 4):
            yield parts
            parts = b""


Reader = Callable[[Path], list[Found]]


def trackers_in(folder: Path) -> dict[str, tuple[Tracker, Reader]]:
    return {
        "mlflow": (MLflow(f"sqlite:///{folder}/mlflow.db"), of_mlflow),
        "tensorboard": (TensorBoard(folder / "tensorboard"), of_tensorboard),
        "wandb": (WeightsAndBiases("tests", mode="offline", folder=folder / "wandb"), of_wandb),
    }


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
        # The long one may have both slots once the short one is over, where that pays on the machine of then.
        replicas = [value for _, value in found[1].series["elastune/replicas"]]
        assert replicas in ([1.0], [2.0], [1.0, 2.0]), replicas
        assert found[1].series["elastune/goodput"]
        for trial, run in zip(study.trials, found, strict=True):
            assert run.state == "complete"
            assert float(run.parameters["rate"]) == pytest.approx(trial.params["rate"], rel=1e-5)
            assert run.parameters["kind"] == trial.params["kind"]
            reported = dict(run.series["objective"])
            assert reported == pytest.approx(trial.intermediate_values, rel=1e-5)
            assert len(run.series["objective"]) == len(trial.intermediate_values)
            assert run.series["value"][0][1] == pytest.approx(trial.value, rel=1e-5)
            assert "its first replicas train" in run.history
        if kind == "mlflow":
            for trial, run in zip(study.trials, found, strict=True):
                epochs = range(tracked_code.EPOCHS[trial.params["kind"]])
                assert run.series["own"] == [(epoch, float(epoch)) for epoch in epochs]


def test_trials_that_are_pruned_and_fail_are_told_as_such(folder: Path) -> None:
    tracker, read = trackers_in(folder)["mlflow"]
    study = optuna.create_study(pruner=optuna.pruners.MedianPruner(1), sampler=optuna.samplers.RandomSampler(seed=0))
    optimize(study, objectives.pruned_by_median, n_trials=4, slots=1, state_dir=folder / "state", trackers=[tracker])
    assert [run.state for run in read(folder)] == [trial.state.name.lower() for trial in study.trials]
