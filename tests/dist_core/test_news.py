"""What a replica tells of its trial, and the times that its hints hold."""

from __future__ import annotations

import itertools
from typing import Any, cast

import pytest

from dist_core.goodput import Hints
from dist_core.link.hints_sender import HintsSender
from dist_core.link.news import News


class Listener:
    """In place of a sender: keeps what it was given."""

    def __init__(self) -> None:
        self.due = True
        self.has_told_speed = False
        self.sent: list[tuple[str, Any]] = []

    def warn(self, message: str) -> None:
        self.sent.append(("warning", message))

    def post_in_order(self, path: str, body: dict[str, Any]) -> None:
        self.sent.append((path, body))

    def hurry(self) -> None:
        self.sent.append(("hurry", None))

    def post_later(self, body: dict[str, Any], *, says_speed: bool) -> None:
        self.sent.append(("hints", {**body, "says speed": says_speed}))


class SomeHints:
    observations = ()

    def to_json(self) -> dict[str, Any]:
        return {"progress": 7.0}


def test_what_is_told_comes_in_order_and_hints_when_they_are_due() -> None:
    listener = Listener()
    news = News(cast("HintsSender", listener))
    hints = cast("Hints", SomeHints())
    news.warn("slow")
    news.announce("/switched", {"generation": 2})
    news.hint(lambda: None, 2)
    news.hint(lambda: hints, 2)
    listener.due = False
    news.hint(lambda: pytest.fail("composing them costs a little"), 2)
    assert listener.sent == [
        ("warning", "slow"),
        ("/switched", {"generation": 2}),
        ("hints", {"generation": 2, "hints": {"progress": 7.0}, "says speed": False}),
    ]


def test_a_trial_that_ends_before_it_has_told_its_speed_tells_it_then() -> None:
    listener = Listener()
    listener.due = False
    news = News(cast("HintsSender", listener))
    hints = cast("Hints", SomeHints())
    news.hint(lambda: hints, 2, is_last=True)
    assert [what for what, _ in listener.sent] == ["hints"]
    listener.has_told_speed = True
    news.hint(lambda: pytest.fail("it has been told"), 2, is_last=True)


def test_where_nobody_listens_warnings_are_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    news = News(None)
    news.warn("slow")
    news.announce("/switched", {"generation": 2})
    news.hint(lambda: pytest.fail("nobody asks for them"), 2)
    news.flush()
    assert caplog.messages == ["slow"]


def test_an_epoch_takes_as_long_as_the_latest_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr("dist_core.link.news.time.monotonic", lambda: now)
    news = News(None)
    assert news.typical_epoch_seconds(0.5) is None
    news.entered(0, 1)
    now = 110.0
    news.entered(0, 1)
    assert news.typical_epoch_seconds(0.01) is None
    assert news.typical_epoch_seconds(0.5) == 20.0
    for seconds in (30.0, 50.0, 40.0):
        news.epoch_ended()
        now += seconds
    news.epoch_ended()
    # The first one began at 100 and ended at 110.
    assert news.typical_epoch_seconds(0.0) == 35.0


def test_the_typical_pause_is_that_of_the_latest_switches() -> None:
    news = News(None)
    assert news.typical_pause is None
    for seconds in (9.0, *(0.1 * number for number in range(1, 10))):
        news.note_pause(seconds)
    assert news.pauses[0] == 0.1
    assert news.typical_pause == 0.5


def test_hints_come_less_often_while_nothing_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("dist_core.link.hints_sender.time.monotonic", lambda: now[0])
    sender = HintsSender(cast("Any", None))
    monkeypatch.setattr(sender, "_wake", lambda: None)
    sent: list[float] = []

    def train(seconds: float, *, says_speed: bool = True) -> None:
        until = now[0] + seconds
        while now[0] < until:
            if sender.due:
                sender.post_later({}, says_speed=says_speed)
                sent.append(now[0])
            now[0] += 0.1

    train(2.0, says_speed=False)
    assert max(after - before for before, after in itertools.pairwise(sent)) < 0.6, "how fast it is is waited for"
    sent.clear()
    train(60.0)
    assert sent[1] - sent[0] < 0.7
    assert sent[-1] - sent[-2] == pytest.approx(10.0, abs=0.2)
    News(sender).note_pause(0.1)
    before = len(sent)
    train(2.0)
    assert len(sent) - before >= 3
