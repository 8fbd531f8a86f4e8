"""Answers to what replicas ask: each question is answered once, however often it comes, and told with the next poll.

Concurrency: any thread may call.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

from tuner_bridge.errors import BridgeError
from tuner_bridge.in_replica.wire import decode_value, encode_exception, encode_value

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
