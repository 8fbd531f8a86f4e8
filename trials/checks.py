"""Checks of values from outside, in the same words everywhere: an integer, a number, texts."""

from __future__ import annotations

import math
from typing import Any, TypeGuard

from trials.errors import InvalidTrialSpec
from trials.plain_words import one_line

LONGEST_NAME = 255


def check_length(what: str, name: object) -> None:
    """Raise InvalidTrialSpec for a name that is no text, is empty, or is too long for a table."""
    if not isinstance(name, str) or not 1 <= len(name) <= LONGEST_NAME:
        raise InvalidTrialSpec(f"{what} is {name!r:.80}; it must be a string of 1 to {LONGEST_NAME} characters")


def check_name(what: str, name: str) -> None:
    """Check a name that people give and others read.

    Raise InvalidTrialSpec for one that a log or a URL could not hold.
    """
    check_length(what, name)
    if one_line(name) != name or "/" in name or name in (".", ".."):
        raise InvalidTrialSpec(
            f"{what} is {name!r:.80}; it must be one line without control characters or slashes, and not '.' or '..'"
        )


def is_integer(value: Any) -> TypeGuard[int]:
    """Tell whether a value is an integer; True and False are not."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value: Any) -> TypeGuard[float]:
    """Tell whether it is a finite number, with a fraction or without."""
    return is_integer(value) or (isinstance(value, float) and math.isfinite(value))


def are_texts(value: Any) -> TypeGuard[tuple[str, ...]]:
    """Tell whether a value is a tuple of texts; one text by itself is not."""
    return isinstance(value, tuple) and all(isinstance(each, str) for each in value)
