"""A command's arguments as parameters: ``--lr 0.1``, ``--lr=0.1``, ``lr=0.1`` and ``--flag``. Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

_OPTION = re.compile(r"^--?([A-Za-z][\w.-]*)(?:=(.*))?$", re.DOTALL)
_ASSIGNED = re.compile(r"^\+{0,2}([A-Za-z_][\w.]*)=(.*)$", re.DOTALL)
"""As Hydra takes them."""


def parameters_of(command: Sequence[str]) -> dict[str, Any]:
    """Return a command's options by name without dashes: numbers as numbers, an option without a value as True."""
    found: dict[str, Any] = {}
    for name, value, _ in _pieces(command):
        found[name] = True if value is None else _read(value)
    return found


def with_parameters(command: Sequence[str], changed: Mapping[str, Any]) -> list[str]:
    """Return the command with other values; raise ValueError for a name that it does not have."""
    words = list(command)
    pieces = {name: (value, place) for name, value, place in _pieces(command)}
    for name, value in changed.items():
        if name not in pieces:
            known = ", ".join(pieces) or "no options"
            raise ValueError(f"the command has no {name!r} to change; it has {known}")
        before, place = pieces[name]
        if before is None:
            raise ValueError(f"{name!r} is an option without a value; it cannot be set to {value!r}")
        text = value if isinstance(value, str) else json.dumps(value)
        word = words[place]
        words[place] = f"{word[: len(word) - len(before)]}{text}"
    return words


def _pieces(command: Sequence[str]) -> list[tuple[str, str | None, int]]:
    """Name, value, and the place of the word that the value ends."""
    pieces: list[tuple[str, str | None, int]] = []
    index = 0
    while index < len(command):
        word = command[index]
        if word == "-c":
            # A program in the place of a value; what comes behind it is its own.
            index += 2
            continue
        option, assigned = _OPTION.match(word), _ASSIGNED.match(word)
        if option is not None and option.group(2) is not None:
            pieces.append((option.group(1), option.group(2), index))
        elif option is not None and index + 1 < len(command) and _is_value(command[index + 1]) and word != "-m":
            pieces.append((option.group(1), command[index + 1], index + 1))
            index += 1
        elif option is not None and word != "-m":
            pieces.append((option.group(1), None, index))
        elif assigned is not None:
            pieces.append((assigned.group(1), assigned.group(2), index))
        index += 1
    return pieces


def _is_value(word: str) -> bool:
    """Negative numbers begin like an option."""
    return _OPTION.match(word) is None


def _read(text: str) -> Any:
    try:
        value = json.loads(text)
    except ValueError:
        return text
    return value if isinstance(value, bool | int | float) else text
