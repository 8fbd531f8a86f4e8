"""A transport for a question or two: the standard library's connection under httpx2's client.

httpx2's own pool is what long-lived drivers want; to load it takes as long as all of a short command may.
"""

from __future__ import annotations

import http.client
import socket
from typing import cast
from urllib.parse import urlsplit

import httpx2


class QuickTransport(httpx2.BaseTransport):
    """One connection, of plain HTTP, for one thread; opened again where the server has closed it."""

    def __init__(self, url: str, *, connect_seconds: float = 3.0, seconds: float = 40.0) -> None:
        parts = urlsplit(url)
        self._connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=connect_seconds)
        self._seconds = seconds

    def handle_request(self, request: httpx2.Request) -> httpx2.Response:
        # What only reads is asked again where the server had closed a connection that was kept open.
        may_repeat = self._connection.sock is not None and request.method == "GET"
        try:
            return self._ask(request)
        except (OSError, http.client.HTTPException) as error:
            self._connection.close()
            if not may_repeat:
                raise httpx2.ConnectError(str(error) or type(error).__name__, request=request) from error
        return self.handle_request(request)

    def _ask(self, request: httpx2.Request) -> httpx2.Response:
        if self._connection.sock is None:
            self._connection.connect()
            cast("socket.socket", self._connection.sock).settimeout(self._seconds)
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in request.headers.raw}
        self._connection.request(request.method, request.url.raw_path.decode("ascii"), request.read(), headers)
        answer = self._connection.getresponse()
        return httpx2.Response(answer.status, headers=answer.getheaders(), content=answer.read(), request=request)

    def close(self) -> None:
        self._connection.close()
