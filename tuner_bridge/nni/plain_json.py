"""NNI's JSON without what runs code when it is read.

NNI's reader makes objects of some dictionaries: of pickled bytes, or of classes and functions that are named. A
parameter comes from the experiment's own tuner and may name code, but holds no pickles; a result comes from a replica
and goes into the tuner's process, so that it may do neither.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from typing import Any

from tuner_bridge.errors import InvalidValue

PICKLED = "__nni_obj__"
NAMING = ("__nni_type__", "__symbol__", "__instance_type__")
"""Keys whose value names code, or holds it pickled behind ``bytes:``."""
OTHERS = ("__enum__", "__pandas__")
_PLAIN_ARRAY = re.compile(r"^(bool_?|u?int(8|16|32|64)|float(16|32|64)|complex(64|128)|str)$")
"""Types of arrays; with another one, NNI's reader calls a function of NumPy's that bears its name."""


def check_parameter(text: str) -> str:
    """Return the text, if nothing in it would be unpickled; raise InvalidValue otherwise, and for what is no JSON."""

    def check(name: str, value: Any) -> None:
        if name == PICKLED or (name in NAMING and "bytes:" in str(value)[:80]):
            raise InvalidValue(
                "a parameter from NNI holds pickled bytes, which run code when they are loaded; have the tuner give "
                "numbers, strings, and lists and dictionaries of them"
            )

    _read(text, check)
    return text


def check_metric(text: str) -> None:
    """Raise InvalidValue for a result that would make code run in NNI's dispatcher."""

    def check(name: str, value: Any) -> None:
        is_array = name == "dtype" and not _PLAIN_ARRAY.match(str(value))
        if name in (PICKLED, *NAMING, *OTHERS) or is_array:
            raise InvalidValue(
                f"a result holds an object ({name}), which would run code in the tuner's process; report numbers, "
                "strings, arrays of numbers, and lists and dictionaries of them"
            )

    metric = _read(text, check)
    value = metric.get("value") if isinstance(metric, dict) else None
    if isinstance(value, str):
        _read(value, check)


def number_in(value: Any) -> float | None:
    """Return the number that tuners look at: the value or its ``default``; None for what is not finite."""
    if isinstance(value, dict):
        value = value.get("default")
    try:
        number = float(json.loads(value) if isinstance(value, str) else value)
    except (TypeError, ValueError):
        return None
    return number if math.isfinite(number) else None


def _read(text: str, check: Callable[[str, Any], None]) -> Any:
    def checked(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        for name, value in pairs:
            check(name, value)
        return dict(pairs)

    # NNI takes the rest of a line after # or // for a comment: of one line, nothing new can be made so.
    if len(text.splitlines()) > 1:
        raise InvalidValue(f"a message of NNI's has several lines: {text!r:.80}; send it as one line")
    try:
        return json.loads(text, object_pairs_hook=checked)
    except (ValueError, RecursionError) as error:
        raise InvalidValue(f"a message of NNI's is not valid JSON: {text!r:.80}") from error
