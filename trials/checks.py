"""What a value from outside is, asked in the same words everywhere: a whole number, a number, texts."""

from __future__ import annotations

import math
from typing import Any, TypeGuard


def is_whole(value: Any) -> TypeGuard[int]:
    """True and False are not numbers here."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value: Any) -> TypeGuard[float]:
    """Whole or not, but finite."""
    return is_whole(value) or (isinstance(value, float) and math.isfinite(value))


def are_texts(value: Any) -> TypeGuard[tuple[str, ...]]:
    """A tuple of them; one text by itself is not."""
    return isinstance(value, tuple) and all(isinstance(each, str) for each in value)
