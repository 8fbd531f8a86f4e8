"""Names what of an objective cannot be pickled, or is large, by the way from the objective to it."""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from cloudpickle.cloudpickle import _extract_code_globals

from tuner_bridge.errors import InvalidSweep

DEEPEST = 12

Dump = Callable[[Any], None]


def explained(value: Any, what: str, error: Exception, dump: Dump) -> InvalidSweep:
    """Explain what cannot be pickled; ``dump`` pickles a part and throws the result away, or raises."""
    path, culprit = _way_to(value, what, dump, 0, set())
    named = type(culprit)
    kind = named.__qualname__ if named.__module__ == "builtins" else f"{named.__module__}.{named.__qualname__}"
    found = f"{path}, a {kind}" if path != what else f"{what} is a {kind}"
    return InvalidSweep(
        f"{found}, which cannot be sent to replicas: {_words(error)}. Create it in the objective, or in a function "
        "that the objective calls, or load it there from a file. To run a script as it is: "
        'optimize(study, script("train.py"))'
    )


def large_parts(value: Any, what: str, least: int) -> list[str]:
    """Ways to arrays, tensors and tables of so many bytes, as far as they are not within containers."""
    parts = []
    for step, part in _parts(value):
        size = _bytes_of(part)
        if size >= least:
            parts.append(f"{_joined(what, step)} ({size / 2**20:.0f} MiB)")
    return parts


def _bytes_of(part: Any) -> int:
    if isinstance(part, type):
        return 0
    size = getattr(part, "nbytes", 0)
    if isinstance(size, int):
        return size
    # A table's, which says it by column.
    usage = getattr(part, "memory_usage", None)
    return int(usage().sum()) if callable(usage) else 0


def _joined(path: str, step: str) -> str:
    """Join the steps of a way; the first one behind the name of the whole needs no relative clause."""
    return path + step.removeprefix(", which")


def _words(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"[:200].rstrip(".")


def _way_to(value: Any, path: str, dump: Dump, depth: int, seen: set[int]) -> tuple[str, Any]:
    """Return the deepest part that cannot be pickled by itself."""
    seen.add(id(value))
    if depth < DEEPEST:
        for step, part in _parts(value):
            if id(part) in seen:
                continue
            try:
                dump(part)
            except Exception:
                return _way_to(part, path + step if depth else _joined(path, step), dump, depth + 1, seen)
    return path, value


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield a value's parts, each with the words that lead to it."""
    if isinstance(value, types.FunctionType):
        names = _extract_code_globals(value.__code__)
        for name in sorted(names & value.__globals__.keys()):
            yield _named(name, value.__globals__[name])
        for name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
            try:
                yield _named(name, cell.cell_contents)
            except ValueError:
                continue
        for default in value.__defaults__ or ():
            yield ", which has a default argument", default
    elif isinstance(value, types.MethodType):
        yield ", which is a method of an object", value.__self__
    elif isinstance(value, Mapping):
        for key, each in value.items():
            yield f"[{key!r:.40}]", each
    elif isinstance(value, list | tuple | set | frozenset):
        for place, each in enumerate(value):
            yield f"[{place}]", each
    elif isinstance(value, type):
        for name, each in vars(value).items():
            if not name.startswith("__"):
                yield f".{name}", each
    else:
        held = getattr(value, "__dict__", None)
        if isinstance(held, dict):
            for name, each in held.items():
                yield f".{name}", each
        for name in ("func", "args", "keywords", "__wrapped__"):
            if hasattr(value, name) and not isinstance(held, dict):
                yield f".{name}", getattr(value, name)


def _named(name: str, part: Any) -> tuple[str, Any]:
    verb = "calls" if isinstance(part, types.FunctionType) else "uses" if isinstance(part, type) else "reads"
    return f", which {verb} {name}", part
