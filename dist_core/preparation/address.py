"""The content address of prepared data: its name, the code that makes it and what that is given."""

from __future__ import annotations

import hashlib
import inspect
import json
import re
import textwrap
from collections.abc import Callable, Mapping
from types import CodeType, FunctionType
from typing import Any

from dist_core.errors import InvalidTraining

_SHOWN = 16
"""Hexadecimal digits of the digest in a folder's name."""
_PLAIN = (type(None), bool, int, float, str, bytes)


def address_of(name: str, make: Callable[..., Any], arguments: Mapping[str, Any], parts: int) -> str:
    """A folder's name: another one for other code, other arguments, another number of parts.

    Of the code it is the source of ``make`` and of the functions, classes and plain values of its own module that it
    uses, and of those that they use. Raises InvalidTraining for a name that is no folder's, and for arguments that are
    not plain values.
    """
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name):
        raise InvalidTraining(
            f"prepared data was named {name!r}; a name has letters, digits, '.', '_' and '-', and begins with a letter "
            "or digit"
        )
    try:
        given = json.dumps(dict(arguments), sort_keys=True, default=_as_json)
    except TypeError as error:
        raise InvalidTraining(
            f"prepared({name!r}) was given arguments of which no address can be made ({error}). "
            "Give numbers, texts, and lists and dictionaries of them"
        ) from None
    digest = hashlib.sha256()
    for part in (given, str(parts), *_sources(make, {})):
        digest.update(part.encode())
        digest.update(b"\0")
    return f"{name}-{digest.hexdigest()[:_SHOWN]}"


def _as_json(value: Any) -> Any:
    if isinstance(value, tuple):
        return list(value)
    if hasattr(value, "__fspath__"):
        return str(value)
    raise TypeError(f"{type(value).__name__} {value!r}")


def _sources(used: Any, seen: dict[str, None]) -> list[str]:
    """Of something that code uses, and of what that uses in turn."""
    function = inspect.unwrap(used) if callable(used) else used
    key = f"{getattr(function, '__module__', '')}.{getattr(function, '__qualname__', repr(function))}"
    if key in seen:
        return []
    seen[key] = None
    found = [key, _source(function)]
    if isinstance(function, FunctionType):
        bound = inspect.getclosurevars(function).nonlocals
        spaces = {
            name: function.__globals__[name] for name in _names(function.__code__) if name in function.__globals__
        }
        for name, value in sorted({**spaces, **bound}.items()):
            found += _sources_of_global(name, value, function.__module__, seen)
    elif isinstance(function, type):
        for name, value in sorted(vars(function).items()):
            if isinstance(value, FunctionType):
                found += _sources_of_global(name, value, function.__module__, seen)
    return found


def _sources_of_global(name: str, value: Any, module: str, seen: dict[str, None]) -> list[str]:
    if isinstance(value, _PLAIN) or (isinstance(value, tuple) and all(isinstance(each, _PLAIN) for each in value)):
        return [f"{name}={value!r}"]
    if isinstance(value, (FunctionType, type)) and value.__module__ == module:
        return _sources(value, seen)
    return []


def _names(code: CodeType) -> set[str]:
    within = [each for each in code.co_consts if isinstance(each, CodeType)]
    return set(code.co_names).union(*(_names(each) for each in within))


def _source(used: Any) -> str:
    try:
        return textwrap.dedent(inspect.getsource(used))
    except (OSError, TypeError):
        code = getattr(used, "__code__", None)
        return "" if code is None else f"{code.co_code!r} {code.co_names} {_constants(code)}"


def _constants(code: CodeType) -> list[str]:
    return [_source_of_code(each) if isinstance(each, CodeType) else repr(each) for each in code.co_consts]


def _source_of_code(code: CodeType) -> str:
    return f"{code.co_code!r} {code.co_names} {_constants(code)}"
