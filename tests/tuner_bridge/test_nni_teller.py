"""Intermediate results of an NNI trial: in order, several at a time, none lost with a checkpoint."""

from __future__ import annotations

import itertools
import json
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest

from dist_core.errors import ControlChannelError, ReplicaExit
from tuner_bridge.in_replica.wire import decode_value
from tuner_bridge.nni import channel as teller_file
from tuner_bridge.nni.channel import Result, Teller


class Channel:
    """A scheduler behind which a driver answers when it is let to."""

    def __init__(self) -> None:
        self.may_answer = threading.Event()
        self.metrics: list[list[dict[str, Any]]] = []
        self.reports: list[dict[str, Any]] = []
        self.asked: list[str] = []
        self.answer: dict[str, Any] = {"value": None}
        self.error: Exception | None = None

    def request(self, method: str, path: str, body: Any) -> Any:
        if self.error is not None:
            raise self.error
        if path == "/reports":
            self.reports += body["reports"]
            return None
        self.asked.append(body["id"])
        if not self.may_answer.wait(0.02):
            return {"answer": None}
        self.metrics.append(decode_value(body["arguments"]["metrics"]))
        return {"answer": self.answer}


def result(number: int, *, reported: bool = True) -> Result:
    report = {"step": number, "value": float(number), "progress": 0.0} if reported else None
    return Result(metric=json.dumps(number), order=number, report=report)


@pytest.fixture
def channel() -> Channel:
    return Channel()


def made(channel: Channel, **core: Any) -> Teller:
    questions = (f"q{number}" for number in itertools.count())
    known: Any = SimpleNamespace(channel=channel, leave_if_asked=lambda: None, **core)
    if "leave" in core:
        known.leave_if_asked = core["leave"]
    return Teller(known, lambda: next(questions))


def test_results_come_in_order_and_together_while_the_trial_goes_on(channel: Channel) -> None:
    told = made(channel)
    for number in range(250):
        told.tell(result(number, reported=number % 2 == 0))
    assert [each["order"] for each in told.untold()] == list(range(250))
    channel.may_answer.set()
    told.flush()
    assert told.untold() == []
    assert [each["order"] for batch in channel.metrics for each in batch] == list(range(250))
    assert max(map(len, channel.metrics)) == teller_file.MOST_AT_ONCE
    assert [each["step"] for each in channel.reports] == list(range(0, 250, 2))
    # Asked again under the same name while there was no answer.
    assert len(set(channel.asked)) == len(channel.metrics)


def test_what_has_no_answer_is_not_told(channel: Channel) -> None:
    told = made(channel)
    told.tell(result(0))
    time.sleep(0.1)
    assert told.untold() == [result(0)]


def test_a_trial_that_reports_too_fast_waits(channel: Channel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(teller_file, "MOST_UNTOLD", 3)
    told = made(channel)
    for number in range(3):
        told.tell(result(number))
    threading.Timer(0.2, channel.may_answer.set).start()
    began = time.monotonic()
    told.tell(result(3))
    assert time.monotonic() - began > 0.1


def test_whoever_waits_leaves_when_asked(channel: Channel) -> None:
    def leave() -> None:
        raise ReplicaExit("preempted")

    told = made(channel, leave=leave)
    told.tell(result(0))
    with pytest.raises(ReplicaExit):
        told.flush()
    assert told.untold() == [result(0)]


def test_a_refusal_and_a_lost_scheduler_are_raised_where_the_trial_reports_next(channel: Channel) -> None:
    channel.answer = {"exception": {"message": "the disk is full"}}
    channel.may_answer.set()
    told = made(channel)
    told.tell(result(0))
    with pytest.raises(RuntimeError, match="NNI did not accept the result: the disk is full"):
        told.flush()
    channel.error = ControlChannelError("nobody there")
    told = made(channel)
    told.tell(result(0))
    with pytest.raises(ControlChannelError, match="nobody there"):
        told.flush()
