"""Values that an objective leaves in memory and a callback looks for: replicas are processes of their own.

With plain Optuna both run in one process, and recipes such as keeping the best model in a global work.
"""

from __future__ import annotations

import dis
import functools
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

_CHANGERS = frozenset({"add", "append", "clear", "extend", "insert", "pop", "put", "setdefault", "update"})
_READS = ("LOAD_GLOBAL", "LOAD_NAME")
_FINDS = ("LOAD_ATTR", "LOAD_METHOD")


def left_behind(objective: Callable[..., Any], callbacks: Sequence[Callable[..., Any]]) -> list[str]:
    """Names that the objective sets or changes, and one of the callbacks reads; sorted."""
    changed = {name for each in _codes(objective) for name in _changes(each)}
    read = {name for callback in callbacks for each in _codes(callback) for name in _reads(each)}
    return sorted(changed & read)


def _codes(function: Any) -> Iterator[tuple[Any, types.CodeType]]:
    """Code objects behind something callable, each with the object that it is a method of; helpers beside it too."""
    waiting: list[tuple[Any, Any]] = [(None, function)]
    seen: set[types.CodeType] = set()
    while waiting:
        owner, each = waiting.pop()
        if isinstance(each, functools.partial):
            waiting.append((owner, each.func))
        elif isinstance(each, types.MethodType):
            waiting.append((each.__self__, each.__func__))
        elif isinstance(each, types.FunctionType):
            inner = [each.__code__]
            while inner:
                code = inner.pop()
                if code in seen:
                    continue
                seen.add(code)
                yield owner, code
                inner += [constant for constant in code.co_consts if isinstance(constant, types.CodeType)]
                used = [each.__globals__.get(name) for name in code.co_names]
                waiting += [
                    (None, found)
                    for found in used
                    if isinstance(found, types.FunctionType) and found.__globals__ is each.__globals__
                ]
        elif isinstance(method := vars(type(each)).get("__call__"), types.FunctionType):
            waiting.append((each, method))


def _changes(found: tuple[Any, types.CodeType]) -> Iterator[str]:
    owner, code = found
    before: list[dis.Instruction] = []
    for each in dis.get_instructions(code):
        if each.opname == "STORE_GLOBAL":
            yield str(each.argval)
        elif each.opname == "STORE_ATTR" and before:
            yield from _attribute(owner, "".join(code.co_varnames[:1]), before[-1], str(each.argval))
        elif each.opname == "STORE_SUBSCR" and len(before) > 1 and before[-2].opname in _READS:
            yield str(before[-2].argval)
        elif each.opname in _FINDS and each.argval in _CHANGERS and before[-1].opname in _READS:
            yield str(before[-1].argval)
        before.append(each)


def _reads(found: tuple[Any, types.CodeType]) -> Iterator[str]:
    owner, code = found
    before = None
    for each in dis.get_instructions(code):
        if each.opname in _READS:
            yield str(each.argval)
        elif each.opname in _FINDS and before is not None:
            yield from _attribute(owner, "".join(code.co_varnames[:1]), before, str(each.argval))
        before = each


def _attribute(owner: Any, first: str, base: dis.Instruction, name: str) -> Iterator[str]:
    """Yield ``a.name`` if both sides could know the object: a global, or what the function is a method of."""
    if base.opname in _READS:
        yield f"{base.argval}.{name}"
    elif owner is not None and base.opname.startswith("LOAD_FAST"):
        # Newer Pythons load two at once.
        variable = base.argval[-1] if isinstance(base.argval, tuple) else base.argval
        if variable == first:
            yield f"{type(owner).__qualname__}.{name}"
