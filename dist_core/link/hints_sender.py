"""Sends a replica's news to the scheduler beside training: latest hints win, announcements keep their order."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from typing import Any

from dist_core.errors import ControlChannelError
from dist_core.link.client import ControlChannel

logger = logging.getLogger(__name__)

FIRST_SECONDS = 0.4
"""Between two hints of a trial that has just begun, or has just become another size: much is learnt then."""
LATER_SECONDS = 10.0
SLOWER = 1.6
"""Growth of each interval over the one before."""


class HintsSender:
    def __init__(self, channel: ControlChannel) -> None:
        self._channel = channel
        self._condition = threading.Condition()
        self._hints: dict[str, Any] | None = None
        self._queue: deque[tuple[str, dict[str, Any]]] = deque()
        self._sending = False
        self._last = 0.0
        self._interval = FIRST_SECONDS
        self.has_told_speed = False
        """Hints have said how fast steps are."""
        self._thread: threading.Thread | None = None
        self._closed = False

    @property
    def due(self) -> bool:
        """Tell whether new hints are due; composing them costs a little."""
        return time.monotonic() - self._last >= self._interval

    def hurry(self) -> None:
        """Send hints more often again: they are worth more from now on."""
        self._interval = FIRST_SECONDS

    def post_later(self, body: dict[str, Any], *, says_speed: bool) -> None:
        """Send hints when nothing else is to be sent; those behind them are later, once they say how fast steps are."""
        self._last = time.monotonic()
        if says_speed:
            self.has_told_speed = True
            self._interval = min(LATER_SECONDS, self._interval * SLOWER)
        with self._condition:
            self._hints = body
            self._wake()

    def post_in_order(self, path: str, body: dict[str, Any]) -> None:
        with self._condition:
            self._queue.append((path, body))
            self._wake()

    def warn(self, message: str) -> None:
        """Put a sentence into the trial's history."""
        self.post_in_order("/warning", {"message": message})

    def flush(self, timeout: float = 5.0) -> None:
        """Wait until everything queued has been sent, or ``timeout`` seconds."""
        deadline = time.monotonic() + timeout
        with self._condition:
            while (self._queue or self._hints is not None or self._sending) and time.monotonic() < deadline:
                self._condition.wait(0.05)

    def close(self) -> None:
        """Send what is queued, and end."""
        self.flush()
        with self._condition:
            self._closed = True
            self._condition.notify_all()

    def _wake(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="elastune-hints", daemon=True)
            self._thread.start()
        self._condition.notify_all()

    def _run(self) -> None:
        while True:
            with self._condition:
                while not (self._queue or self._hints is not None or self._closed):
                    self._condition.wait()
                if self._closed:
                    return
                if self._queue:
                    path, body = self._queue.popleft()
                else:
                    assert self._hints is not None
                    path, body, self._hints = "/hints", self._hints, None
                self._sending = True
            try:
                self._channel.request("POST", path, body, give_up_after=5.0)
            except ControlChannelError as error:
                logger.debug("message not delivered path=%s error=%s", path, error)
            finally:
                with self._condition:
                    self._sending = False
                    self._condition.notify_all()
