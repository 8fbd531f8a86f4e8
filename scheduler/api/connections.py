"""Connections to the API: how many at once, and how long one may take to say what it wants.

A connection that has shown no token is a stranger's. Strangers have to finish the head of a request in time, and when
there is no room for a new connection the stranger that has been there longest goes; those with a token stay.
"""

from __future__ import annotations

import asyncio
import resource
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

HEAD_SECONDS = 10.0
"""Seconds for the head of a request, from its first byte or from the connection's start."""
BODY_SECONDS = 30.0
"""Seconds for all of a stranger's request."""
RESERVED_DESCRIPTORS = 384
"""Descriptors for files, pipes, and the scheduler's own connections."""
MOST_DESCRIPTORS = 65536
BACKLOG = 128
"""Connections that the kernel holds until they are accepted; all of them may be accepted in one go."""
EXTENSION = "elastune.connection"


def raise_descriptor_limit() -> None:
    """Take what the system allows: a shell's usual 1,024 descriptors are used up by a few hundred replicas."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, MOST_DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def most_connections() -> int:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = MOST_DESCRIPTORS if soft == resource.RLIM_INFINITY else soft
    return max(64, most - RESERVED_DESCRIPTORS - BACKLOG)


class PatientProtocol(H11Protocol):
    """uvicorn's protocol with deadlines and a limit; ``trusted`` is set by the gate when it has seen a token."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.trusted = False
        self._deadline: asyncio.TimerHandle | None = None
        self.hung_up = False
        self.connected_at = self.loop.time()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as in uvicorn
        super().connection_made(transport)
        # Those that were hung up on are among them until the loop comes to it.
        open_ones = [each for each in self.connections if isinstance(each, PatientProtocol) and not each.hung_up]
        if len(open_ones) > most_connections():
            # This one is a stranger itself, so that there always is one.
            min((each for each in open_ones if not each.trusted), key=lambda each: each.connected_at).hang_up()
        self._set_deadline(HEAD_SECONDS)

    def connection_lost(self, exc: Exception | None) -> None:
        self._clear_deadline()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._deadline is None and self.conn.their_state is h11.IDLE:
            self._set_deadline(HEAD_SECONDS)
        super().data_received(data)
        if self.scope is not None:
            extensions: dict[str, Any] = self.scope.setdefault("extensions", {})
            extensions[EXTENSION] = self
        if self.conn.their_state is h11.SEND_BODY and not self.trusted:
            self._set_deadline(BODY_SECONDS - (self.loop.time() - self.connected_at))
        elif self.conn.their_state is not h11.IDLE:
            self._clear_deadline()

    def trust(self) -> None:
        self.trusted = True
        if self.conn.their_state is not h11.IDLE:
            self._clear_deadline()

    def hang_up(self) -> None:
        self.hung_up = True
        self._clear_deadline()
        self.transport.abort()

    def _set_deadline(self, seconds: float) -> None:
        self._clear_deadline()
        self._deadline = self.loop.call_later(max(0.0, seconds), self.hang_up)

    def _clear_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
