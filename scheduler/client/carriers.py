"""Carriers of a request to a scheduler and of its answer."""

from __future__ import annotations

import http.client
import json
import socket
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, cast
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


class Carrier(Protocol):
    def ask(self, request: Request) -> Answer:
        """Send a request and return its answer; raise NoAnswer."""

    def close(self) -> None: ...


class QuickCarrier:
    """One connection, of plain HTTP, for one thread; opened again where the server has closed it."""

    def __init__(self, url: str) -> None:
        """Prepare the connection; raise NoAnswer for an address that is none."""
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
