"""A carrier for a question or two: the standard library's connection.

httpx2's pool is what long-lived drivers want; to load it takes as long as all of a short command may.
"""

from __future__ import annotations

import http.client
import socket
from typing import cast
from urllib.parse import urlsplit

from scheduler.client.carriers import CONNECT_SECONDS, SECONDS, Answer, NoAnswer, Request


class QuickCarrier:
    """One connection, of plain HTTP, for one thread; opened again where the server has closed it."""

    def __init__(self, url: str) -> None:
        """Raises NoAnswer for an address that is none."""
        try:
            parts = urlsplit(url)
            self._connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=CONNECT_SECONDS)
        except (ValueError, http.client.HTTPException) as error:
            raise NoAnswer(str(error)) from error
        self._base = parts.path

    def ask(self, request: Request) -> Answer:
        # What only reads is asked again where the server had closed a connection that was kept open.
        may_repeat = self._connection.sock is not None and request.method == "GET"
        try:
            return self._ask(request)
        except (OSError, http.client.HTTPException) as error:
            self._connection.close()
            if not may_repeat:
                raise NoAnswer(str(error) or type(error).__name__) from error
        return self.ask(request)

    def _ask(self, request: Request) -> Answer:
        if self._connection.sock is None:
            self._connection.connect()
        cast("socket.socket", self._connection.sock).settimeout(SECONDS)
        path, headers = self._base + request.path, dict(request.headers)
        self._connection.request(request.method, path, request.content or None, headers)
        answer = self._connection.getresponse()
        return Answer(answer.status, answer.read())

    def close(self) -> None:
        self._connection.close()
