"""Inboxes: what the scheduler has to say of each trial, handed to the thread that serves it, once.

Concurrency: any thread may call; each inbox is read by one.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

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
