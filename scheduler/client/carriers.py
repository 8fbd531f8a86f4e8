"""Carriers of a request to a scheduler and of its answer."""

from __future__ import annotations

import contextlib
import http.client
import json
import select
import socket
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast
from urllib.parse import urlsplit

CONNECT_SECONDS = 3.0
SECONDS = 40.0
"""Seconds for an answer: one to a question that waits for news comes within half a minute."""
PART_BYTES = 1 << 20


class Parts:
    """Bytes that lie in several places, to be sent one after the other; again, if they have to be."""

    def __init__(self, parts: Sequence[memoryview]) -> None:
        self.parts = parts

    def __len__(self) -> int:
        return sum(part.nbytes for part in self.parts)

    def __iter__(self) -> Iterator[bytes]:
        for part in self.parts:
            for start in range(0, part.nbytes, PART_BYTES):
                yield bytes(part[start : start + PART_BYTES])


@dataclass(frozen=True, slots=True)
class Request:
    method: str
    path: str
    """Below the scheduler's address, with its query."""
    content: bytes | Parts = b""
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Answer:
    status: int
    content: bytes

    @property
    def text(self) -> str:
        return self.content.decode(errors="replace")

    @property
    def value(self) -> Any:
        """Return the answer's JSON; raise ValueError for what is none."""
        return json.loads(self.content) if self.content else None


class NoAnswer(Exception):
    """A request got no answer: nobody listens there, or there is no such address, as the message says."""


class Carrier:
    """Connections to a scheduler, one for each thread that asks at the same time; kept open for the next question."""

    def __init__(self, url: str) -> None:
        """Prepare the connections; raise NoAnswer for an address that is none."""
        try:
            parts = urlsplit(url)
            self._host, self._port = parts.hostname or "", parts.port
        except ValueError as error:
            raise NoAnswer(str(error)) from error
        if parts.scheme not in ("http", "https"):
            raise NoAnswer("the address begins with neither http:// nor https://")
        self._kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        self._base = parts.path
        self._idle: deque[http.client.HTTPConnection] = deque()
        self._closed = False

    def ask(self, request: Request) -> Answer:
        """Send a request and return its answer; raise NoAnswer."""
        connection = self._take()
        # What only reads is asked again where the server closes a connection that was kept open.
        may_repeat = connection.sock is not None and request.method == "GET"
        try:
            answer = self._exchange(connection, request)
        except (OSError, http.client.HTTPException) as error:
            connection.close()
            if not may_repeat:
                raise NoAnswer(str(error) or type(error).__name__) from error
            return self.ask(request)
        except BaseException:
            connection.close()
            raise
        if connection.sock is not None:
            # The server has not said that it closes it.
            self._idle.append(connection)
        if self._closed:
            self.close()
        return answer

    def _take(self) -> http.client.HTTPConnection:
        """Return a connection that nobody uses: one that was kept, unless its server has closed it, or a new one."""
        while True:
            try:
                connection = self._idle.pop()
            except IndexError:
                return self._kind(self._host, self._port, timeout=CONNECT_SECONDS)
            waiting = select.poll()
            waiting.register(connection.sock, select.POLLIN)
            if not waiting.poll(0):
                return connection
            connection.close()

    def _exchange(self, connection: http.client.HTTPConnection, request: Request) -> Answer:
        if connection.sock is None:
            connection.connect()
            cast("socket.socket", connection.sock).settimeout(SECONDS)
        connection.request(request.method, self._base + request.path, request.content or None, dict(request.headers))
        answer = connection.getresponse()
        return Answer(answer.status, answer.read())

    def close(self) -> None:
        """Close connections that nobody uses; others are closed once they have brought their answer."""
        self._closed = True
        with contextlib.suppress(IndexError):
            while True:
                self._idle.pop().close()
