"""What the driver of a study consists of, each piece alone."""

from __future__ import annotations

import queue
import threading
from typing import Any

from tuner_bridge.driving import exchange as module
from tuner_bridge.driving.exchange import Answers, Inboxes
from tuner_bridge.in_replica.wire import decode_value


def question(number: int, trial_id: str = "t") -> dict[str, Any]:
    return {"id": f"{trial_id}:{number}", "trial_id": trial_id, "method": "suggest", "arguments": {}}


def news(**parts: Any) -> dict[str, Any]:
    return {"live": [], "questions": [], "finished": [], **parts}


def test_a_question_that_comes_again_gets_the_same_answer() -> None:
    calls: list[str] = []

    def ask(method: str, arguments: dict[str, Any]) -> int:
        calls.append(method)
        return len(calls)

    answers = Answers()
    first, again = answers.to(question(1), ask), answers.to(question(1), ask)
    assert first == again
    assert decode_value(first["answer"]["value"]) == 1
    assert decode_value(answers.to(question(2), ask)["answer"]["value"]) == 2
    assert len(calls) == 2


def test_what_asking_raises_is_the_answer() -> None:
    def ask(method: str, arguments: dict[str, Any]) -> None:
        raise KeyError(method)

    assert Answers().to(question(1), ask)["answer"]["exception"]


def test_a_poll_takes_along_what_is_answered_while_it_waits(monkeypatch: Any) -> None:
    monkeypatch.setattr(module, "ANSWERED_SECONDS", 30.0)
    answers = Answers()
    told = {"id": "t:1", "answer": {"value": 1}}
    assert not answers.leave(told), "nobody collects: it is to be sent"
    collected: list[Any] = []
    poll = threading.Thread(target=lambda: collected.extend(answers.collect(1)))
    poll.start()
    while not answers.leave(told):
        pass
    poll.join()
    assert collected == [told]
    assert answers.collect(0) == []


def test_each_thread_hears_of_its_trial_once() -> None:
    inboxes = Inboxes()
    inbox = inboxes.open("t")
    live = {"trial_id": "t", "state": "running", "seen": "running 1"}
    everything = news(live=[live], questions=[question(1), question(2, "other")])
    assert inboxes.hand_out(everything) == (1, True)
    assert inboxes.hand_out(everything) == (0, False)
    assert inboxes.known() == ({"t": "running 1"}, ["t:1"])
    assert [inbox.get_nowait() for _ in range(2)] == [{"live": live}, {"question": question(1)}]
    inboxes.is_answered("t", "t:1")
    assert inboxes.hand_out(news(questions=[question(1)])) == (1, True), "its answer was lost"


def test_the_end_is_told_once_and_a_refusal_reaches_the_trial() -> None:
    inboxes = Inboxes()
    inbox = inboxes.open("t")
    ended = {"trial_id": "t", "state": "succeeded"}
    inboxes.hand_out(news(finished=[ended]))
    inboxes.hand_out(news(finished=[ended]))
    error = ValueError("not taken")
    inboxes.refuse("t", error)
    inboxes.refuse("somebody", error)
    found = []
    while True:
        try:
            found.append(inbox.get_nowait())
        except queue.Empty:
            break
    assert found == [{"finished": ended}, {"refused": error}]
    inboxes.close("t")
    inboxes.is_answered("t", "t:1")
    assert inboxes.known() == ({}, [])
