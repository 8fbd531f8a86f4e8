"""Line: connections to a scheduler that may be restarted at another address, which its server file then names."""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import httpx2

from dist_core.link.refusals import refusal

for _name in ("httpx2", "httpcore2"):
    # A script that logs at INFO would read a line for each of our requests.
    if logging.getLogger(_name).level == logging.NOTSET:
        logging.getLogger(_name).setLevel(logging.WARNING)


class Line:
    """Thread-safe. ``token`` is asked with each request, where requests do not bring their own."""

    def __init__(
        self,
        url: str,
        token: Callable[[], str] | None = None,
        *,
        server_file: Path | None = None,
        headers: Mapping[str, str] | None = None,
        timeout: httpx2.Timeout,
        transport: httpx2.BaseTransport | None = None,
    ) -> None:
        """Prepare the connection; raise httpx2.InvalidURL."""
        self.url = url
        self._token = token
        self._server_file = server_file
        self._headers = dict(headers or {})
        self._timeout = timeout
        self._transport = transport
        self._lock = threading.Lock()
        self._client = self._connect()
        self._left: list[httpx2.Client] = []
        """Clients of addresses that the scheduler has left; other threads may still wait for an answer there."""
        self._answered_at = time.monotonic()

    def _connect(self) -> httpx2.Client:
        return httpx2.Client(
            base_url=self.url,
            headers=self._headers,
            auth=None if self._token is None else self._authorized,
            timeout=self._timeout,
            limits=httpx2.Limits(max_connections=200),
            trust_env=False,
            # Nothing to verify without TLS, and reading all certificates takes longer than starting a replica may.
            verify=self.url.startswith("https"),
            transport=self._transport,
        )

    def _authorized(self, request: httpx2.Request) -> httpx2.Request:
        assert self._token is not None
        request.headers["Authorization"] = f"Bearer {self._token()}"
        return request

    def send(self, method: str, path: str, **options: Any) -> httpx2.Response:
        """Send once. Raises httpx2.TransportError."""
        return self._client.request(method, path, **options)

    def stream(self, method: str, path: str, **options: Any) -> AbstractContextManager[httpx2.Response]:
        """Send once, for an answer that is read in parts. Raises httpx2.TransportError."""
        return self._client.stream(method, path, **options)

    def refused(self, response: httpx2.Response) -> str | None:
        """Return the scheduler's reason for a refusal, and note that it has answered if it was the scheduler."""
        why = refusal(response.content) if 400 <= response.status_code < 500 else None
        if response.status_code < 400 or why is not None:
            self._answered_at = time.monotonic()
        return why

    @property
    def lost_for(self) -> float:
        """Seconds since the scheduler last answered."""
        return time.monotonic() - self._answered_at

    def follow(self) -> bool:
        """Go on at the scheduler's present address; return whether that is another one."""
        if self._server_file is None:
            return False
        try:
            url = json.loads(self._server_file.read_text())["url"]
        except (OSError, ValueError, KeyError):
            return False
        with self._lock:
            if url == self.url:
                return False
            self._left.append(self._client)
            self.url = url
            self._client = self._connect()
            return True

    def close(self) -> None:
        for client in (*self._left, self._client):
            client.close()
