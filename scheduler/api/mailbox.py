"""Questions from replicas to the driver of their study, and its answers.

A tuner's trial object lives in the driver; rank 0 asks it through here. Nothing is stored: a question is repeated by
its replica until answered, the driver answers a repeated question alike, so a restarted scheduler loses nothing.
Used from the event loop only.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

FORGOTTEN_SECONDS = 30.0


@dataclass(slots=True)
class _Question:
    study: str
    document: dict[str, Any]
    asked_at: float
    answered: asyncio.Event = field(default_factory=asyncio.Event)
    answer: dict[str, Any] | None = None


@dataclass(slots=True)
class News:
    """Counter of events for a study's driver: who names the number it heard last misses nothing since."""

    number: int = 0
    more: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the number is no longer this one."""


class Mailbox:
    def __init__(self) -> None:
        self._questions: dict[str, _Question] = {}
        self._news: dict[str, News] = {}

    def notify(self, study: str) -> None:
        """Wake the study's driver: something that it waits for has happened."""
        before = self.news(study)
        self._news[study] = News(before.number + 1)
        before.more.set()

    def news(self, study: str) -> News:
        return self._news.setdefault(study, News())

    async def ask(self, study: str, document: dict[str, Any], wait_seconds: float) -> dict[str, Any] | None:
        """Return the driver's answer, or None if there is none yet: ask again with the same id."""
        now = time.monotonic()
        question = self._questions.setdefault(document["id"], _Question(study, document, now))
        question.asked_at = now
        self.notify(study)
        try:
            await asyncio.wait_for(question.answered.wait(), wait_seconds)
        except asyncio.TimeoutError:
            return None
        self._questions.pop(document["id"], None)
        return question.answer

    def open_questions(self, study: str, trial_ids: Sequence[str]) -> list[dict[str, Any]]:
        """Return the open questions of these trials; questions whose replica has stopped asking are forgotten."""
        now = time.monotonic()
        for question_id, question in list(self._questions.items()):
            if now - question.asked_at > FORGOTTEN_SECONDS:
                del self._questions[question_id]
        return [
            question.document
            for question in self._questions.values()
            if question.study == study and question.document["trial_id"] in trial_ids and not question.answered.is_set()
        ]

    def answer(self, study: str, question_id: str, answer: dict[str, Any]) -> None:
        question = self._questions.get(question_id)
        if question is not None and question.study == study:
            question.answer = answer
            question.answered.set()
