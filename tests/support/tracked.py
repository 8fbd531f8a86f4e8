"""What trackers have written down, read back."""

from __future__ import annotations

import json
import struct
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tuner_bridge.trackers import MLflow, TensorBoard, Tracker, WeightsAndBiases


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
    """Runs by number; W&B's own process may still be writing the last one when it says that it is done."""
    began = time.monotonic()
    while True:
        trials, waited = _trials_of_wandb(folder), time.monotonic() - began
        # An interrupted one has no state.
        has_states = waited > 3 or all(found.state for found in trials.values())
        if (has_states and -1 not in trials) or waited > 20:
            return [trials[number] for number in sorted(trials)]
        time.sleep(0.2)


def _trials_of_wandb(folder: Path) -> dict[int, Found]:
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
    return trials


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
