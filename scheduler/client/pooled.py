"""A carrier for drivers, which ask often and from several threads: httpx2's pool of connections."""

from __future__ import annotations

import httpx2

from dist_core.link.line import Line
from scheduler.client.carriers import CONNECT_SECONDS, SECONDS, Answer, NoAnswer, Request


class PooledCarrier:
    def __init__(self, url: str, *, transport: httpx2.BaseTransport | None = None) -> None:
        """Prepare the connections; raise NoAnswer for an address that is none."""
        try:
            timeout = httpx2.Timeout(SECONDS, connect=CONNECT_SECONDS)
            self._line = Line(url, timeout=timeout, transport=transport)
        except httpx2.InvalidURL as error:
            raise NoAnswer(str(error)) from error

    def ask(self, request: Request) -> Answer:
        try:
            answer = self._line.send(
                request.method, request.path, content=request.content, headers=dict(request.headers)
            )
        except (httpx2.TransportError, httpx2.InvalidURL, httpx2.UnsupportedProtocol) as error:
            raise NoAnswer(str(error)) from error
        return Answer(answer.status_code, answer.content)

    def close(self) -> None:
        self._line.close()
