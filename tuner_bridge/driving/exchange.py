"""Exchange between the thread that polls the scheduler and the threads that serve a study's trials.

``Inboxes`` hands each trial's news to the thread that serves it, once. ``Answers`` answers each question of a replica
once, however often it comes, and has the next poll take the answer along. ``ToldParameters`` keeps each trial's
parameters until the scheduler has them. Concurrency: any thread may call; each inbox is read by one.
"""

from __future__ import annotations

import math
import queue
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from tuner_bridge.errors import BridgeError
from tuner_bridge.in_replica.wire import decode_value, encode_exception, encode_value

Message = dict[str, Any]
"""One of ``live``, ``question``, ``finished`` with what the scheduler says, or ``refused`` with an exception."""


@dataclass(slots=True)
class _Inbox:
    messages: queue.SimpleQueue[Message] = field(default_factory=queue.SimpleQueue)
    queued: set[str] = field(default_factory=set)
    seen: str = ""
    """Latest news of the trial, so that only other news is told."""


class Inboxes:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._inbox_by_trial: dict[str, _Inbox] = {}

    def open(self, trial_id: str) -> queue.SimpleQueue[Message]:
        with self._lock:
            self._inbox_by_trial[trial_id] = inbox = _Inbox()
        return inbox.messages

    def close(self, trial_id: str) -> None:
        with self._lock:
            del self._inbox_by_trial[trial_id]

    def known(self) -> tuple[dict[str, str], list[str]]:
        """Return the news that each trial has heard, and the questions that are being worked on."""
        with self._lock:
            seen = {trial_id: inbox.seen for trial_id, inbox in self._inbox_by_trial.items()}
            return seen, [each for inbox in self._inbox_by_trial.values() for each in inbox.queued]

    def hand_out(self, news: Mapping[str, Any]) -> tuple[int, bool]:
        """Hand out news; return the number of new questions, and whether anything was new."""
        fresh, asked = False, 0
        with self._lock:
            for live in news["live"]:
                inbox = self._inbox_by_trial.get(live["trial_id"])
                if inbox is not None and inbox.seen != live["seen"]:
                    inbox.seen = live["seen"]
                    inbox.messages.put({"live": live})
                    fresh = True
            for question in news["questions"]:
                inbox = self._inbox_by_trial.get(question["trial_id"])
                if inbox is not None and question["id"] not in inbox.queued:
                    inbox.queued.add(question["id"])
                    inbox.messages.put({"question": question})
                    fresh, asked = True, asked + 1
            for summary in news["finished"]:
                inbox = self._inbox_by_trial.get(summary["trial_id"])
                if inbox is not None and "finished" not in inbox.queued:
                    inbox.queued.add("finished")
                    inbox.messages.put({"finished": summary})
                    fresh = True
        return asked, fresh

    def is_answered(self, trial_id: str, question_id: str) -> None:
        """Note that a question is answered; should it come again, its answer was lost."""
        with self._lock:
            inbox = self._inbox_by_trial.get(trial_id)
            if inbox is not None:
                inbox.queued.discard(question_id)

    def refuse(self, trial_id: str, error: Exception) -> None:
        with self._lock:
            inbox = self._inbox_by_trial.get(trial_id)
        if inbox is not None:
            inbox.messages.put({"refused": error})


class ToldParameters:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: dict[str, dict[str, Any]] = {}

    def note(self, trial_id: str, parameters: Mapping[str, Any]) -> None:
        with self._lock:
            self._waiting.setdefault(trial_id, {}).update({name: _plain(value) for name, value in parameters.items()})

    def waiting(self) -> dict[str, dict[str, Any]]:
        with self._lock:
            return {trial_id: dict(parameters) for trial_id, parameters in self._waiting.items()}

    def are_told(self, told: Mapping[str, Mapping[str, Any]]) -> None:
        """Note that the scheduler has these; what was noted meanwhile still waits."""
        with self._lock:
            for trial_id, parameters in told.items():
                waiting = self._waiting.get(trial_id, {})
                for name, value in parameters.items():
                    if name in waiting and waiting[name] == value:
                        del waiting[name]
                if not waiting:
                    self._waiting.pop(trial_id, None)


def flattened(parameters: Mapping[str, Any], before: str = "") -> dict[str, Any]:
    """Nested choices by their path: ``{"layer": {"size": 3}}`` is ``layer.size``."""
    flat: dict[str, Any] = {}
    for name, value in parameters.items():
        if isinstance(value, Mapping):
            flat |= flattened(value, f"{before}{name}.")
        else:
            flat[f"{before}{name}"] = value
    return flat


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float) and math.isfinite(value):
        return value
    return repr(value)[:200]


ANSWERS_KEPT = 4096
ANSWERED_SECONDS = 0.005
"""Answers that are there so soon travel with the next poll, which saves a request for each; others go alone."""

Ask = Callable[[str, dict[str, Any]], Any]
"""A question of a replica, as method and arguments; what it returns or raises goes back to the replica."""

Told = dict[str, Any]
"""An answer with the id of its question, as the scheduler takes it."""


class Answers:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._answers_by_question: OrderedDict[str, tuple[Any, dict[str, Any]]] = OrderedDict()
        """Questions and answers by the question's id."""
        self._waiting: list[Told] = []
        """Answers for the next poll."""
        self._collects = False
        """True while the next poll waits for answers."""
        self._arrived = threading.Condition()

    def to(self, question: Mapping[str, Any], ask: Ask) -> Told:
        """Return the answer to a question; one that is asked again, because its answer got lost, gets the same."""
        asked = (question["method"], question["arguments"])
        with self._lock:
            before, answer = self._answers_by_question.get(question["id"], (asked, None))
        if before != asked:
            error = BridgeError(
                f"question {question['id']} was asked again with other contents ({before[0]!r} before, {asked[0]!r} "
                "now); two processes of a trial must not share one trial object: have one of them report"
            )
            return {"id": question["id"], "answer": {"exception": encode_exception(error)}}
        if answer is None:
            answer = _answer(ask, question)
            self._remember(question["id"], asked, answer)
        return {"id": question["id"], "answer": answer}

    def _remember(self, question_id: str, asked: Any, answer: dict[str, Any]) -> None:
        with self._lock:
            self._answers_by_question[question_id] = asked, answer
            while len(self._answers_by_question) > ANSWERS_KEPT:
                self._answers_by_question.popitem(last=False)

    # ------------------------------------------------------------------ what the next poll takes along

    def leave(self, answer: Told) -> bool:
        """Leave an answer for the next poll; return False if it has to be sent by itself."""
        with self._arrived:
            if self._collects:
                self._waiting.append(answer)
                self._arrived.notify()
            return self._collects

    def collect(self, questions: int) -> list[Told]:
        """Return the immediate answers to the questions that have just been handed out."""
        with self._arrived:
            self._collects = True
            self._arrived.wait_for(lambda: len(self._waiting) >= questions, ANSWERED_SECONDS)
            self._collects = False
            answers, self._waiting = self._waiting, []
        return answers


def _answer(ask: Ask, question: Mapping[str, Any]) -> dict[str, Any]:
    try:
        arguments = {name: decode_value(value) for name, value in question["arguments"].items()}
        return {"value": encode_value(ask(question["method"], arguments), lenient=True)}
    except Exception as error:
        return {"exception": encode_exception(error)}
