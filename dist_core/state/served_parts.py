"""ServedParts: one process's part of a trial's state, kept in memory for those that go on from it.

What only some of them need of it, rows of tensors that are divided, they ask for by the piece. Served over HTTP to
whoever has the key, which goes by the scheduler to replicas of the same trial.
"""

from __future__ import annotations

import hmac
import io
import secrets
import threading
import time
from collections.abc import Callable, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socket import AF_INET6
from socketserver import TCPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

import torch

from dist_core.state.parts import DIVIDED

ROWS, AT = "rows", "at"
SLOT = "served"
"""In place of a tensor's rows: their number, shape and type, by which they are asked for."""
SMALL_BYTES = 4096
"""What is no larger is sent with what is around it."""
LOOK_SECONDS = 0.2
POLL_SECONDS = 0.05
"""So long the server takes to hear that it is closed."""


class ServedParts:
    """``host``: where the others reach this process. Its tensors must not change any more."""

    def __init__(self, states: dict[str, Any], host: str) -> None:
        self.states = states
        self.key = secrets.token_urlsafe(24)
        self._rows: list[torch.Tensor] = []
        self._frame = self._framed(states)
        self._done: set[str] = set()
        self._changed = threading.Condition()
        self._server = _Server((host, 0), _handler_of(self))
        threading.Thread(
            target=self._server.serve_forever, args=(POLL_SECONDS,), name="elastune-parts", daemon=True
        ).start()

    @property
    def address(self) -> tuple[str, int]:
        host, port = self._server.server_address[:2]
        return str(host), int(port)

    def until_done(self, count: int, *, or_else: Callable[[], bool], seconds: float) -> None:
        """Wait until so many processes have all that they need; not beyond that time, nor when ``or_else`` is so."""
        deadline = time.monotonic() + seconds
        with self._changed:
            while len(self._done) < count and not or_else() and time.monotonic() < deadline:
                self._changed.wait(LOOK_SECONDS)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        # The server knows of this object, which would stay until a collection.
        self.states, self._rows, self._frame = {}, [], b""

    # ------------------------------------------------------------------ what is asked of it, by threads of its server

    def note_done(self, who: str) -> None:
        with self._changed:
            self._done.add(who)
            self._changed.notify_all()

    def frame(self) -> bytes:
        """The states without what is large and divided."""
        return self._frame

    def piece(self, slot: int, first: int, end: int) -> memoryview:
        """Bytes of some rows. Raises IndexError."""
        rows = self._rows[slot]
        if not 0 <= first <= end <= len(rows):
            raise IndexError(f"rows {first} to {end} of {len(rows)}")
        return bytes_of(rows[first:end])

    # ------------------------------------------------------------------

    def _framed(self, states: Mapping[str, Any]) -> bytes:
        kept = {
            name: self._without_rows(state) if isinstance(state, dict) and state.get(DIVIDED) else state
            for name, state in states.items()
        }
        buffer = io.BytesIO()
        torch.save(kept, buffer)
        return buffer.getvalue()

    def _without_rows(self, value: Any) -> Any:
        if isinstance(value, dict) and isinstance(value.get(ROWS), torch.Tensor) and AT in value:
            rows = value[ROWS]
            if not rows.dim() or rows.nbytes <= SMALL_BYTES:
                return value
            self._rows.append(rows.contiguous())
            kind = str(rows.dtype).removeprefix("torch.")
            return {**value, ROWS: {SLOT: len(self._rows) - 1, "shape": list(rows.shape), "dtype": kind}}
        if isinstance(value, dict):
            return {key: self._without_rows(item) for key, item in value.items()}
        if isinstance(value, list):
            return [self._without_rows(item) for item in value]
        return value


def bytes_of(rows: torch.Tensor) -> memoryview:
    """Their memory, as what can be sent and received into; they lie in the host's, one after another."""
    content: Any = rows.flatten().view(torch.uint8).numpy()
    return memoryview(content)


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, address: tuple[str, int], handler: type[BaseHTTPRequestHandler]) -> None:
        if ":" in address[0]:
            self.address_family = AF_INET6
        super().__init__(address, handler)

    def server_bind(self) -> None:
        """Without asking for the address's name, as its base does: that may take seconds, and all stand still."""
        TCPServer.server_bind(self)


def _handler_of(parts: ServedParts) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        # An answer is written in two parts, of which the second must not wait for the first's receipt.
        disable_nagle_algorithm = True

        def do_GET(self) -> None:  # http.server's name
            shown = self.headers.get("Authorization", "")
            if not hmac.compare_digest(shown.encode(), f"Bearer {parts.key}".encode()):
                self._answer(403, b"this key opens nothing here")
                return
            asked = urlsplit(self.path)
            words = {name: values[0] for name, values in parse_qs(asked.query).items()}
            try:
                if asked.path == "/piece":
                    self._answer(200, parts.piece(int(words["slot"]), int(words["first"]), int(words["end"])))
                elif asked.path == "/frame":
                    self._answer(200, parts.frame())
                elif asked.path == "/done":
                    parts.note_done(words["who"])
                    self._answer(200, b"")
                else:
                    self._answer(404, b"there is a /frame, a /piece and a /done")
            except (LookupError, ValueError) as error:
                self._answer(422, str(error).encode())

        def _answer(self, status: int, content: bytes | memoryview) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, format: str, *arguments: Any) -> None:  # noqa: A002  # http.server's name
            """Not into the trial's log."""

    return Handler
