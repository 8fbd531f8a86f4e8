"""What ``nni.get_next_parameter`` and ``nni.report_*`` speak through in a replica.

All ranks get the same parameters, rank 0 alone reports. Intermediate results are numbered by the trial's state, not by
the process: one that restarts from a checkpoint goes on counting where that was taken, and what it reports again has
the number that it had.
"""

from __future__ import annotations

import itertools
import json
import math
from typing import Any

import nni
from nni.runtime.trial_command_channel import TrialCommandChannel

import dist_core
from dist_core.core import get_core
from tuner_bridge.replica import ask_driver
from tuner_bridge.wire import decode_value

STATE = "nni-results"


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
        self._questions = itertools.count()
        self._stay_registered()

    def _stay_registered(self) -> None:
        """NNI keeps one channel, also when the user's code runs again from its top."""
        if not self._core.registry.has(STATE):
            self._core.registry.register(STATE, self._count)

    def receive_parameter(self) -> Any:
        self._stay_registered()
        channel = self._core.channel
        if channel is None:
            raise RuntimeError("this process is no replica of an elastic trial; unset NNI_TRIAL_COMMAND_CHANNEL")
        return nni.load(channel.request("GET", "/trial")["payload"]["nni"]["parameter"])

    def send_metric(self, type: str, parameter_id: int | None, trial_job_id: str, sequence: int, value: Any) -> None:  # noqa: A002
        self._core.raise_postponed()
        self._stay_registered()
        if self._core.replaying or (self._core.joining and not self._core.joined):
            # What it would report has been reported, or will be by others.
            return
        if self._core.took_over and self._core.reports:
            # Code that reports on rank 0 alone has counted nothing here so far.
            self._core.took_over = False
            self._count.value = max(self._count.value, self._ask("taken", {}))
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
        self._ask("metric", {"metric": nni.dump(metric)})
        number = _number(value)
        if number is not None:
            dist_core.report(number, sequence if kind == "PERIODICAL" else self._count.value)

    def _ask(self, method: str, arguments: dict[str, Any]) -> Any:
        environment = self._core.environment
        assert environment is not None
        question = f"{environment.replica_id}/nni-{next(self._questions)}"
        answer = ask_driver(self._core, question, method, arguments)
        if "exception" in answer:
            raise RuntimeError(f"NNI did not take the result: {answer['exception']['message']}")
        return decode_value(answer["value"])


def _number(value: Any) -> float | None:
    """What tuners look at: the value itself, or its ``default``."""
    if isinstance(value, dict):
        value = value.get("default")
    try:
        number = float(json.loads(value) if isinstance(value, str) else value)
    except (TypeError, ValueError):
        return None
    return number if math.isfinite(number) else None
