"""What the driver of a study consists of, each piece alone."""

from __future__ import annotations

import math
import os
import queue
import random
import subprocess
import sys
import threading
from typing import Any

import pytest

from scheduler.client.connection import SchedulerClient
from scheduler.errors import RequestRefused
from tuner_bridge.driving import exchange as module
from tuner_bridge.driving.exchange import Answers, Inboxes, ToldParameters, flattened
from tuner_bridge.driving.study_driver import StudyDriver, driver_identity, has_ended
from tuner_bridge.in_replica.wire import decode_value
from tuner_bridge.optuna.importance import importance


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


# --------------------- a driver of this machine that was killed is known to be gone; any other one may still be there


TELLS = "from tuner_bridge.driving.study_driver import driver_identity; print(driver_identity(), flush=True); input()"


def test_a_process_that_was_killed_has_ended() -> None:
    with subprocess.Popen([sys.executable, "-c", TELLS], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        told = other.stdout.readline().decode().strip()
        assert not has_ended(told)
        other.kill()
        # Nobody has asked for its end yet.
        os.waitid(os.P_PID, other.pid, os.WEXITED | os.WNOWAIT)
        assert has_ended(told)
        other.wait()
        assert has_ended(told)


def test_a_number_that_another_process_has_now_is_another() -> None:
    machine, pid, began, mark = driver_identity().split("-")
    assert not has_ended(f"{machine}-{pid}-{began}-{mark}")
    assert has_ended(f"{machine}-{pid}-{int(began) - 60}-{mark}")


def test_of_others_it_is_not_known() -> None:
    _, pid, began, mark = driver_identity().split("-")
    for told in (f"0000000000000000-{pid}-{int(began) - 60}-{mark}", "4711-abcdef", "", "a-b-c-d"):
        assert not has_ended(told)


def test_where_the_machine_does_not_tell_nobody_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: str) -> str:
        raise OSError(f"no {path}")

    monkeypatch.setattr(os, "readlink", refuse)
    machine, _, began, mark = driver_identity().split("-")
    assert not has_ended(f"{machine}-4194304-{began}-{mark}"), "there is no such process"


def test_each_one_is_another_and_fits() -> None:
    first, second = driver_identity(), driver_identity()
    assert first != second
    assert max(map(len, (first, second))) <= 64


# ----------------- a sweep whose trials are to live in a team's namespace says so, and its names are that namespace's


def asked_for(monkeypatch: pytest.MonkeyPatch, namespace: str) -> tuple[str, dict[str, Any]]:
    """Path and body with which the driver attaches."""
    seen: list[tuple[str, dict[str, Any]]] = []

    def request(method: str, path: str, body: Any = None, **options: Any) -> Any:
        seen.append((path, body))
        raise RequestRefused("enough")

    client = SchedulerClient("http://127.0.0.1:9", "a token that nobody knows")
    monkeypatch.setattr(client, "request", request)
    monkeypatch.setenv("ELASTUNE_NAMESPACE", namespace)
    driver = StudyDriver("resnet-1", "minimize", client, reconnect=lambda client: client, title="resnet")
    with pytest.raises(RequestRefused):
        driver.attach({"yields_to": ["net"], "weight": 2.0})
    client.close()
    return seen[0]


def test_names_of_a_study_are_those_of_its_namespace(monkeypatch: pytest.MonkeyPatch) -> None:
    path, body = asked_for(monkeypatch, "team")
    assert path == "/studies/team.resnet-1"
    assert (body["title"], body["namespace"]) == ("team.resnet", "team")
    assert body["terms"] == {"yields_to": ["team.net"], "weight": 2.0}


def test_without_a_namespace_names_are_as_given(monkeypatch: pytest.MonkeyPatch) -> None:
    path, body = asked_for(monkeypatch, "")
    assert (path, body["title"], "namespace" in body) == ("/studies/resnet-1", "resnet", False)
    assert body["terms"]["yields_to"] == ["net"]


# -------------------------------- what a tuner tried reaches the scheduler once, and which of it mattered can be told


def test_what_was_noted_waits_until_it_was_told() -> None:
    told = ToldParameters()
    told.note("a", {"lr": 0.1, "act": ("relu", 2), "bad": math.nan})
    told.note("b", {"lr": 0.2})
    first = told.waiting()
    assert first == {"a": {"lr": 0.1, "act": "('relu', 2)", "bad": "nan"}, "b": {"lr": 0.2}}
    told.note("a", {"lr": 0.3, "depth": 4})
    told.are_told(first)
    assert told.waiting() == {"a": {"lr": 0.3, "depth": 4}}
    told.are_told(told.waiting())
    assert told.waiting() == {}


def test_nested_choices_are_named_by_their_path() -> None:
    assert flattened({"a": 1, "layer": {"size": 3, "act": {"_name": "relu"}}}) == {
        "a": 1,
        "layer.size": 3,
        "layer.act._name": "relu",
    }


@pytest.mark.parametrize("direction", ["minimize", "maximize"])
def test_the_parameter_that_matters_comes_first(direction: str) -> None:
    draw = random.Random(0)
    ended = []
    for _ in range(60):
        lr, width, kind = 10 ** draw.uniform(-4, 0), draw.randint(8, 64), draw.choice(["a", "b"])
        loss = (math.log10(lr) + 2) ** 2 + 0.001 * width
        ended.append(({"lr": lr, "width": width, "kind": kind, "same": 1}, loss if direction == "minimize" else -loss))
    found = importance(ended, direction)
    assert next(iter(found)) == "lr"
    assert set(found) == {"lr", "width", "kind"}
    assert sum(found.values()) == pytest.approx(1.0, abs=1e-3)


def test_without_a_choice_there_is_nothing_to_tell() -> None:
    with pytest.raises(ValueError, match="a parameter that all finished trials have"):
        importance([({"a": 1}, 0.5), ({"a": 1}, 0.7)], "minimize")
    with pytest.raises(ValueError, match="a parameter that all finished trials have"):
        importance([({"a": 1}, 0.5), ({"b": 1}, 0.7)], "minimize")
