"""What brings a request to a scheduler and its answer back."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

CONNECT_SECONDS = 3.0
SECONDS = 40.0
"""For an answer: one to a question that waits for news comes within half a minute."""


@dataclass(frozen=True, slots=True)
class Request:
    method: str
    path: str
    """Below the scheduler's address, with its query."""
    content: bytes = b""
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
        """Raises ValueError for what is no JSON."""
        return json.loads(self.content) if self.content else None


class NoAnswer(Exception):
    """Nobody answered, or there is no such address; why."""


class Carrier(Protocol):
    def ask(self, request: Request) -> Answer:
        """Raises NoAnswer."""

    def close(self) -> None: ...
