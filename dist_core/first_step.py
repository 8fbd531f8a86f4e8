"""Calls to make when this process is about to take its first training step: it has imported all that it needs."""

from __future__ import annotations

from collections.abc import Callable

_calls: list[Callable[[], object]] = []


def at_first_step(call: Callable[[], object]) -> None:
    """Register a call. Who trains nothing never makes it."""
    _calls.append(call)


def first_step_begins() -> None:
    """Make the registered calls, each once."""
    while _calls:
        _calls.pop(0)()
