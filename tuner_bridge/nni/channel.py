"""What ``nni.get_next_parameter`` and ``nni.report_*`` speak through in a replica.

All ranks get the same parameters, rank 0 alone reports. Intermediate results are numbered by the trial's state, not by
the process: one that restarts from a checkpoint goes on counting where that was taken, and what it reports again has
the number that it had.
"""

from __future__ import annotations

import json
import math
from typing import Any

import nni
from nni.runtime.trial_command_channel import TrialCommandChannel

import dist_core
from dist_core.core import get_core
from tuner_bridge.replica import ask_driver


class _Count:
    """How many intermediate results there are; part of the trial's checkpoints."""

    value = 0

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"]


class ElasticChannel(TrialCommandChannel):  # type: ignore[misc]  # NNI has no types
    def __init__(self) -> None:
        self._core = get_core()
        self._count = _Count()
        self._core.registry.register("nni-results", self._count)

    def receive_parameter(self) -> Any:
        channel = self._core.channel
        if channel is None:
            raise RuntimeError("this process is no replica of an elastic trial; unset NNI_TRIAL_COMMAND_CHANNEL")
        return nni.load(channel.request("GET", "/trial")["payload"]["nni"]["parameter"])

    def send_metric(self, type: str, parameter_id: int | None, trial_job_id: str, sequence: int, value: Any) -> None:  # noqa: A002
        self._core.raise_postponed()
        if self._core.joining and not self._core.joined:
            # What it would report has been reported, or will be by others.
            return
        if type == "PERIODICAL":
            sequence = self._count.value
        if self._core.reports:
            self._tell(type, parameter_id, trial_job_id, sequence, value)
        if type == "PERIODICAL":
            # Not before it has been taken: a replica that leaves meanwhile saves the count with its state.
            self._count.value += 1

    def _tell(self, kind: str, parameter_id: int | None, trial_job_id: str, sequence: int, value: Any) -> None:
        metric = {
            "parameter_id": parameter_id,
            "trial_job_id": trial_job_id,
            "type": kind,
            "sequence": sequence,
            "value": nni.dump(value),
        }
        environment = self._core.environment
        assert environment is not None
        question = f"{environment.replica_id}/nni-{kind}-{sequence}"
        answer = ask_driver(self._core, question, "metric", {"metric": nni.dump(metric)})
        if "exception" in answer:
            raise RuntimeError(f"NNI did not take the result: {answer['exception']['message']}")
        number = _number(value)
        if number is not None:
            dist_core.report(number, sequence if kind == "PERIODICAL" else self._count.value)


def _number(value: Any) -> float | None:
    """What tuners look at: the value itself, or its ``default``."""
    if isinstance(value, dict):
        value = value.get("default")
    try:
        number = float(json.loads(value) if isinstance(value, str) else value)
    except (TypeError, ValueError):
        return None
    return number if math.isfinite(number) else None
