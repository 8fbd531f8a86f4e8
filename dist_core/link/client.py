"""The replica's line to the scheduler: JSON over HTTP with the replica's own token.

Every request can be repeated: the scheduler may be restarted at any moment, perhaps on another port (then the server
file names the new address). ``lost_for`` tells how long it has not answered; the lease is judged by that.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import httpx2

from dist_core.errors import ControlChannelError
from dist_core.link.environment import ReplicaEnvironment
from dist_core.link.line import Line

LARGEST_STEP = 2**62
"""Largest step that the scheduler keeps; its databases count no further."""
RETRY_PAUSE_SECONDS = 0.25
CALL_WAIT_SECONDS = 20.0
TOKEN_SECONDS = 30.0
"""A token in a file is replaced minutes before it runs out."""


class ControlChannel:
    """Thread-safe; one connection pool for all threads of the replica."""

    def __init__(self, environment: ReplicaEnvironment, *, transport: httpx2.BaseTransport | None = None) -> None:
        self._environment = environment
        self._token_read, self._token_read_at = "", float("-inf")
        self._line = Line(
            environment.api_url,
            self._token,
            server_file=environment.server_file,
            headers={"X-Elastune-Replica": environment.replica_id},
            timeout=httpx2.Timeout(CALL_WAIT_SECONDS + 10.0, connect=2.0),
            transport=transport,
        )
        self._closed = threading.Event()

    def _token(self) -> str:
        path = self._environment.token_file
        if path is None:
            return self._environment.token
        if time.monotonic() - self._token_read_at > TOKEN_SECONDS:
            # Where it cannot be read, the one before may do; the scheduler says if it does not.
            with contextlib.suppress(OSError):
                self._token_read, self._token_read_at = path.read_text().strip(), time.monotonic()
        return self._token_read

    @property
    def lost_for(self) -> float:
        """Seconds since the scheduler last answered."""
        return self._line.lost_for

    def close(self) -> None:
        """Send nothing more; requests under way are finished."""
        self._closed.set()

    def let_go_if_closed(self) -> None:
        """Drop connections if nobody waits for an answer any more: a process may go on with other lines."""
        if self._closed.is_set():
            self._line.close()

    def request(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | None = None,
        *,
        give_up_after: float = 30.0,
        params: Mapping[str, Any] | None = None,
    ) -> Any:
        """Send until answered; raises ControlChannelError when refused, or unreachable for ``give_up_after`` s."""
        response = self._until_answered(
            lambda: self._line.send(method, f"/replica{path}", json=body, params=params),
            f"{method} {path}",
            give_up_after,
        )
        return response.json() if response.content else None

    def download(self, path: str, target: Path, *, give_up_after: float = 120.0) -> None:
        """Write a large answer into a file; raises ControlChannelError like `request`, OSError for the file."""

        def fetch() -> httpx2.Response:
            with self._line.stream("GET", f"/replica{path}") as response:
                if response.status_code < 400:
                    with open(target, "wb") as file:
                        file.writelines(response.iter_bytes())
                else:
                    response.read()
                return response

        self._until_answered(fetch, f"GET {path}", give_up_after)

    def _until_answered(
        self, attempt: Callable[[], httpx2.Response], what: str, give_up_after: float
    ) -> httpx2.Response:
        deadline = time.monotonic() + give_up_after
        while True:
            try:
                response = attempt()
                refused = self._line.refused(response)
                if response.status_code < 400 or refused is not None:
                    break
                trouble: object = f"HTTP status {response.status_code}"
            except httpx2.TransportError as error:
                trouble = error
            if self._closed.is_set() or time.monotonic() > deadline:
                raise ControlChannelError(
                    f"the scheduler at {self._line.url} did not answer for {give_up_after:.0f} s: {trouble}"
                )
            time.sleep(RETRY_PAUSE_SECONDS)
            self._line.follow()
        if refused is not None:
            raise ControlChannelError(f"the scheduler refused {what}: {refused}", status=response.status_code)
        return response
