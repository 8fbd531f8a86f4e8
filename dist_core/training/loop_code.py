"""Looks at the code around a loop over batches, for what its values do not say: the user's functions, as bytecode."""

from __future__ import annotations

import dis
import sys
from collections.abc import Iterator, Mapping
from types import FrameType, FunctionType, ModuleType
from typing import Any

from dist_core.state.counts import users_frames
from dist_core.state.script_variables import is_users_module

_PUT_TOGETHER = ("torchmetrics", "torcheval", "ignite", "monai", "accelerate", "horovod")
"""Packages whose metrics, or functions, put together what processes have computed."""
_SIZES = frozenset({"size", "shape", "len", "numel"})
_SUMS = frozenset({"sum", "count_nonzero"})


def counts_by_enumerate() -> bool:
    """Tell whether the user's loop over batches, which asks for its next one, uses their count by ``enumerate()``."""
    frame = next(users_frames(), None)
    if frame is None:
        return False
    here = [(begin, end) for begin, end, line in frame.f_code.co_lines() if line == frame.f_lineno]
    code = list(dis.get_instructions(frame.f_code))
    if not any(each.argval == "enumerate" and any(a <= each.offset < b for a, b in here) for each in code):
        return False
    stored = [each for each in code if each.offset > frame.f_lasti and each.opname.startswith("STORE_")]
    count = _names(stored[0])[0] if stored else None
    return any(each.opname.startswith("LOAD_") and count in _names(each) for each in code)


def sum_over_uncounted_samples() -> str | None:
    """Return a variable in which the user's loop over batches adds up its samples' losses, say, but not their number.

    Whatever it is divided by then, a dataset's length say, is the number of all replicas' samples. None where the body
    has no such variable, or counts its samples too.
    """
    frame = next(users_frames(), None)
    added, set_anew = [], set()
    for statement in _statements_of_body(frame) if frame is not None else ():
        name = _set_by(statement)
        if not any(_operator(each) == "+=" for each in statement):
            set_anew.add(name)
            continue
        said = {str(word) for each in statement if each.opname.startswith("LOAD_") for word in _names(each)}
        multiplies = any(_operator(each) == "*" for each in statement)
        if _SIZES & said and not multiplies:
            return None
        if (_SIZES & said and multiplies) or _SUMS & said:
            added.append(name)
    return next((name for name in added if name not in set_anew), None)


def _statements_of_body(frame: FrameType) -> Iterator[list[dis.Instruction]]:
    """Yield the instructions up to each that stores a value, in the body of the loop that asks for its next batch."""
    code = list(dis.get_instructions(frame.f_code))
    # Some Pythons say where the instruction is, others where its cache is.
    asks = max((each for each in code if each.offset <= frame.f_lasti), key=lambda each: each.offset)
    if asks.opname != "FOR_ITER":
        return
    statement: list[dis.Instruction] = []
    for each in code:
        if not asks.offset < each.offset < asks.argval:
            continue
        statement.append(each)
        if each.opname.startswith("STORE_"):
            yield statement
        if each.opname.startswith(("STORE_", "POP_", "JUMP_")):
            statement = []


def _set_by(statement: list[dis.Instruction]) -> str:
    """Return the name of the variable or attribute, or the key, that a statement sets."""
    if statement[-1].opname != "STORE_SUBSCR":
        return str(_names(statement[-1])[0])
    keys = [each.argval for each in statement if each.opname == "LOAD_CONST" and isinstance(each.argval, str)]
    return keys[0] if keys else "a sum"


def _operator(instruction: dis.Instruction) -> str:
    """Return ``+=`` or ``*``, where the instruction is one of these, as all Pythons from 3.10 on have them."""
    return {"INPLACE_ADD": "+=", "BINARY_MULTIPLY": "*"}.get(instruction.opname, instruction.argrepr)


def _names(instruction: dis.Instruction) -> tuple[Any, ...]:
    """Return the variables of an instruction; newer Pythons load and store two at once."""
    return instruction.argval if isinstance(instruction.argval, tuple) else (instruction.argval,)


def combines_processes() -> bool:
    """Tell whether the script speaks of ``torch.distributed``, or of a package that puts together by it."""
    seen: set[int] = set()
    return any(
        "distributed" in frame.f_code.co_names
        or any(_is_of_those(value) for value in list(frame.f_locals.values()))
        or _module_puts_together(frame.f_globals, seen)
        for frame in users_frames()
    )


def _module_puts_together(variables: Mapping[str, Any], seen: set[int]) -> bool:
    """Tell whether code of the user's with these globals does, or code of the user's that it has imported."""
    if id(variables) in seen:
        return False
    seen.add(id(variables))
    for value in list(variables.values()):
        if _is_of_those(value) or any("distributed" in each.__code__.co_names for each in _functions_of(value)):
            return True
        home = _home_of(value)
        if home in sys.modules and is_users_module(home) and _module_puts_together(vars(sys.modules[home]), seen):
            return True
    return False


def _functions_of(value: Any) -> list[FunctionType]:
    held = vars(value).values() if isinstance(value, type) else [value]
    return [each for each in held if isinstance(each, FunctionType)]


def _is_of_those(value: Any) -> bool:
    """Tell whether a value is one of those packages, or something of theirs."""
    home = _home_of(value)
    return home.startswith("torch.distributed") or home.partition(".")[0] in _PUT_TOGETHER


def _home_of(value: Any) -> str:
    """Return the name of the module that a value is, or is of."""
    if isinstance(value, ModuleType):
        return value.__name__
    home = value.__module__ if isinstance(value, (type, FunctionType)) else type(value).__module__
    return home if isinstance(home, str) else ""
