"""prepared: data that all trials of a study want, made once, by the replicas that come to want it."""

from __future__ import annotations

import errno
import hashlib
import inspect
import json
import logging
import os
import re
import textwrap
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any, TypeVar, overload

import platformdirs

from dist_core.errors import InvalidTraining
from dist_core.preparation.claims import Claims
from dist_core.preparation.shards import PreparedData, Row, write_shard
from dist_core.present import present_replica

PARTS = 64
LOOK_SECONDS = 0.2
"""Between two looks at what others make."""
MOST_DIGITS = 5

T = TypeVar("T")
logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Part:
    """Part of the data that one call of ``make`` is to give: ``index`` of ``count``."""

    index: int
    count: int

    @overload
    def of(self, whole: int) -> range: ...

    @overload
    def of(self, whole: Sequence[T]) -> Sequence[T]: ...

    def of(self, whole: Any) -> Any:
        """Return this part of a sequence, or of the numbers from 0 to ``whole``; the parts in order are all of it."""
        if isinstance(whole, int):
            whole = range(whole)
        size = len(whole)
        return whole[self.index * size // self.count : (self.index + 1) * size // self.count]


def prepared(
    name: str,
    make: Callable[..., Iterable[Row]],
    *,
    arguments: Mapping[str, Any] | None = None,
    parts: int = PARTS,
    folder: str | os.PathLike[str] | None = None,
    most_bytes: int | None = None,
) -> PreparedData:
    """Return the rows that ``make(part, **arguments)`` gives for each part, made once for all trials of the study.

    Replicas that come here share the parts; one that ends leaves its part to the others, and a study that goes on has
    those that were made. Other code, arguments or number of parts make other data.

    Args:
        name: Name of the data within the study.
        make: Gives dictionaries of numbers, texts and arrays, the same each time that it is called with a part: ``for
            path in part.of(paths): yield {"image": ..., "label": ...}``.
        arguments: Further arguments of ``make``.
        parts: Number of parts that are made one by one.
        folder: Folder for whoever uses it, until somebody removes it. Default: one that lies with the study and goes
            with it.
        most_bytes: Bytes of disk that the data may take.

    Returns:
        A dataset of the rows, mapped from disk.

    Raises:
        InvalidTraining: A row fits no table, the limit is passed, or the disk is full.
    """
    if parts < 1 or parts >= 10**MOST_DIGITS:
        raise InvalidTraining(f"prepared({name!r}) has {parts} parts; it takes 1 to {10**MOST_DIGITS - 1}")
    plain_arguments = dict(arguments or {})
    replica = present_replica()
    home = Path(folder) if folder is not None else _home()
    place = home / address_of(name, make, plain_arguments, parts)
    place.mkdir(parents=True, exist_ok=True)
    paths = [place / f"part-{index:05d}-of-{parts:05d}.arrow" for index in range(parts)]
    missing = [index for index in range(parts) if not paths[index].exists()]
    if missing:
        replica.warn(f"data {name!r} is being prepared: {len(missing)} of {parts} parts are missing")
        _make_all(name, make, plain_arguments, paths, place, most_bytes)
    return PreparedData(name, paths)


def _home() -> Path:
    environment = present_replica().environment
    if environment is not None:
        return environment.prepared_dir or environment.checkpoint_dir / "prepared"
    return Path(platformdirs.user_cache_dir("elastune")) / "prepared"


def _make_all(
    name: str,
    make: Callable[..., Iterable[Row]],
    arguments: Mapping[str, Any],
    paths: Sequence[Path],
    place: Path,
    most_bytes: int | None,
) -> None:
    claims, waits = Claims(place), False
    # Each begins somewhere else, so that they rarely ask for the same one.
    turn = os.getpid() % len(paths)
    while missing := [index for index in range(len(paths)) if not paths[index].exists()]:
        present_replica().leave_if_asked()
        made = False
        for index in sorted(missing, key=lambda each: (each - turn) % len(paths)):
            with claims.holding(f"part-{index:05d}") as mine:
                if not mine or paths[index].exists():
                    continue
                _make_one(name, make, arguments, paths, index, most_bytes)
                made, turn = True, index + 1
                break
        if made:
            continue
        if not waits:
            waits = True
            present_replica().warn(
                f"waits for data {name!r}: other processes are making the last {len(missing)} of {len(paths)} parts"
            )
        time.sleep(LOOK_SECONDS)


def _make_one(
    name: str,
    make: Callable[..., Iterable[Row]],
    arguments: Mapping[str, Any],
    paths: Sequence[Path],
    index: int,
    most_bytes: int | None,
) -> None:
    part = Part(index, len(paths))
    what = f"part {index} of data {name!r}"
    began = time.monotonic()
    try:
        rows = write_shard(paths[index], make(part, **arguments), what=what)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise InvalidTraining(
            f"{what} does not fit on the disk of {paths[index].parent} ({error.strerror}); free some space, or give "
            "another folder: prepared(..., folder=). Finished parts are kept"
        ) from error
    logger.info("%s made rows=%d seconds=%.2f", what, rows, time.monotonic() - began)
    if most_bytes is None:
        return
    used = sum(path.stat().st_size for path in paths if path.exists())
    if used > most_bytes:
        paths[index].unlink(missing_ok=True)
        raise InvalidTraining(
            f"data {name!r} would take {used} bytes with {what}, but most_bytes is {most_bytes}; make its rows "
            "smaller, or raise most_bytes"
        )


_SHOWN = 16
"""Hexadecimal digits of the digest in a folder's name."""
_PLAIN = (type(None), bool, int, float, str, bytes)


def address_of(name: str, make: Callable[..., Any], arguments: Mapping[str, Any], parts: int) -> str:
    """Return a folder's name: another one for other code, other arguments, another number of parts.

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
        text = json.dumps(dict(arguments), sort_keys=True, default=_as_json)
    except TypeError as error:
        raise InvalidTraining(
            f"prepared({name!r}) was given arguments that cannot be written as JSON ({error}). Use numbers, strings, "
            "and lists and dictionaries of them"
        ) from None
    digest = hashlib.sha256()
    for part in (text, str(parts), *_sources(make, {})):
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
    """Return the sources of something that code uses, and of what that uses in turn."""
    function = inspect.unwrap(used) if callable(used) else used
    key = f"{getattr(function, '__module__', '')}.{getattr(function, '__qualname__', repr(function))}"
    if key in seen:
        return []
    seen[key] = None
    sources = [key, _source(function)]
    if isinstance(function, FunctionType):
        bound = inspect.getclosurevars(function).nonlocals
        spaces = {
            name: function.__globals__[name] for name in _names(function.__code__) if name in function.__globals__
        }
        for name, value in sorted({**spaces, **bound}.items()):
            sources += _sources_of_global(name, value, function.__module__, seen)
    elif isinstance(function, type):
        for name, value in sorted(vars(function).items()):
            if isinstance(value, FunctionType):
                sources += _sources_of_global(name, value, function.__module__, seen)
    return sources


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
