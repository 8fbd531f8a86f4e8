"""Values and exceptions as JSON between driver and replicas. No pickle: the driver does not trust its replicas."""

from __future__ import annotations

import builtins
import math
import sys
from collections.abc import Mapping
from typing import Any

from tuner_bridge.errors import RemoteTrialError


def encode_value(value: Any) -> Any:
    """Numbers, strings, None and nested lists of them, floats bit for bit (NaN and infinity included)."""
    if isinstance(value, bool) or value is None or isinstance(value, (str, int)):
        return value
    if isinstance(value, (list, tuple)):
        return [encode_value(item) for item in value]
    if isinstance(value, Mapping):
        return {"object": {str(key): encode_value(item) for key, item in value.items()}}
    try:
        number = float(value)
    except (TypeError, ValueError):
        return {"text": repr(value)[:500]}
    return number if math.isfinite(number) else {"float": repr(number)}


def decode_value(value: Any) -> Any:
    if isinstance(value, list):
        return [decode_value(item) for item in value]
    if isinstance(value, dict):
        if "float" in value:
            return float(value["float"])
        if "object" in value:
            return {key: decode_value(item) for key, item in value["object"].items()}
        return value["text"]
    return value


def encode_exception(error: BaseException) -> dict[str, Any]:
    """Type by name and arguments; enough to raise the same type with the same words elsewhere."""
    kind = type(error)
    return {
        "module": kind.__module__,
        "name": kind.__qualname__,
        "message": str(error),
        "arguments": [encode_value(argument) for argument in error.args],
    }


def decode_exception(document: Mapping[str, Any]) -> Exception:
    """The exception that was encoded, of its own type when that type is known in this process.

    Nothing is imported for it, and no constructor of a user's class runs: a replica cannot make the driver run code.
    """
    module_name, name = str(document["module"]), str(document["name"])
    module = builtins if module_name == "builtins" else _loaded(module_name)
    kind = getattr(module, name, None) if module is not None else None
    if not (isinstance(kind, type) and issubclass(kind, Exception)):
        return RemoteTrialError(f"{name}: {document['message']}")
    error = kind.__new__(kind)
    error.args = tuple(decode_value(argument) for argument in document["arguments"])
    return error


def _loaded(module_name: str) -> Any:
    """A module of this process; the driver's script goes by another name in replicas."""
    return sys.modules.get("__main__" if module_name == "__mp_main__" else module_name)
