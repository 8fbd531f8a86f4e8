"""A process that was forked to be a replica, and may become another one: the line to it, and its end of that line."""

from __future__ import annotations

import contextlib
import json
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from trials.inside.replica_start import finish
from trials.inside.user_code import LOADED_BY


@dataclass(slots=True, eq=False)
class Child:
    """A process that is a replica, or could become one again."""

    replica_id: str | None
    kind: object
    """None: a spare, which can become any replica."""
    line: socket.socket | None
    kept_since: float | None = None
    """Since when it waits to become another replica, if it does."""

    @property
    def is_spare(self) -> bool:
        return self.kind is None and self.kept_since is not None

    def hang_up(self) -> None:
        """Speak to it no more; one that waits ends by that."""
        if self.line is not None:
            self.line.close()
            self.line = None


def kind_of(request: Mapping[str, Any]) -> object:
    """Processes that have been a replica of one kind may become another one of it."""
    names = ("study", "entrypoint", "working_dir", "python_path", "user_code")
    environ = request["environ"].items()
    same = {name: value for name, value in environ if not name.startswith("ELASTUNE_") or name in LOADED_BY}
    return [request[name] for name in names], same


def say(line: socket.socket | None, request: Mapping[str, Any]) -> bool:
    """Whether somebody is there to hear."""
    try:
        if line is not None:
            line.sendall(json.dumps(request).encode() + b"\n")
    except OSError:
        return False
    return line is not None


def told(line: socket.socket) -> dict[str, Any]:
    """In a process that waits: what it is to be. It ends when nobody wants it."""
    received = b""
    with contextlib.suppress(OSError):
        while not received.endswith(b"\n"):
            more = line.recv(1 << 20)
            if not more:
                break
            received += more
    if not received.endswith(b"\n"):
        finish(0)
    request: dict[str, Any] = json.loads(received)
    return request
