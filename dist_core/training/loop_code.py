"""Looks at the code around a loop over batches, for what its values do not say: the user's functions, as bytecode."""

from __future__ import annotations

import dis
import sys
from collections.abc import Collection, Iterator, Mapping
from types import FrameType, FunctionType, ModuleType
from typing import Any

from dist_core.state.counts import numbers_by_function, users_frames
from dist_core.state.script_variables import is_users_module
from dist_core.trial.replica import Replica

_PUT_TOGETHER = ("torchmetrics", "torcheval", "ignite", "monai", "accelerate", "horovod")
"""Packages whose metrics, or functions, put together what processes have computed."""
_SIZES = frozenset({"size", "shape", "len", "numel"})
_SUMS = frozenset({"sum", "count_nonzero"})
_OPERATORS = {
    "INPLACE_ADD": "+=",
    "BINARY_MULTIPLY": "*",
    "BINARY_TRUE_DIVIDE": "/",
    "INPLACE_TRUE_DIVIDE": "/=",
}


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

    Whatever it is divided by then is the number of all replicas' samples, as is the dataset's length, by which the code
    behind the loop may divide any sum. None where there is no such variable.
    """
    frame = next(users_frames(), None)
    body, behind = _body_and_behind(frame) if frame is not None else ([], [])
    by_samples: list[str] = []
    added, set_anew, counts = set(), set(), False
    for statement in _statements(body):
        name = _set_by(statement)
        if not any(_operator(each) == "+=" for each in statement):
            set_anew.add(name)
            continue
        added.add(name)
        said = _names_loaded(statement)
        multiplies = any(_operator(each) == "*" for each in statement)
        counts |= bool(_SIZES & said) and not multiplies
        if (_SIZES & said and multiplies) or _SUMS & said:
            by_samples.append(name)
    for statement in _statements(behind):
        if "dataset" in _names_loaded(statement) and any(_operator(each) in ("/", "/=") for each in statement):
            by_samples += sorted((added - set_anew) & _names_loaded(statement))
            counts = False
    return None if counts else next((name for name in by_samples if name not in set_anew), None)


def count_that_decides(numbers: Collection[int]) -> tuple[str, int] | None:
    """Return a variable of the user's that is one of these numbers, and that the code around the loop compares."""
    for frame, variables in numbers_by_function().values():
        code = list(dis.get_instructions(frame.f_code))
        compares = [each for each in _statements(code) if any(part.opname == "COMPARE_OP" for part in each)]
        compared = {name for statement in compares for name in _names_loaded(statement)}
        for path, value in variables.items():
            if type(value) is int and value in numbers and path.rpartition(".")[2] in compared:
                return path, value
    return None


def divides_by_len() -> bool:
    """Tell whether the caller's caller is code of the user's that divides by a length: ``total / len(loader)``."""
    frame = sys._getframe(2)
    if frame is not next(users_frames(), None):
        return False
    # Python 3.11 may stand at the instruction before the call.
    behind = (each for each in dis.get_instructions(frame.f_code) if each.offset > frame.f_lasti)
    follows = next((each for each in behind if each.opname != "CALL"), None)
    return follows is not None and _operator(follows) in ("/", "/=")


def _body_and_behind(frame: FrameType) -> tuple[list[dis.Instruction], list[dis.Instruction]]:
    """Return the body of the loop that asks for its next batch, and what follows it in the same function."""
    code = list(dis.get_instructions(frame.f_code))
    # Some Pythons say where the instruction is, others where its cache is.
    asks = max((each for each in code if each.offset <= frame.f_lasti), key=lambda each: each.offset)
    if asks.opname != "FOR_ITER":
        return [], []
    body = [each for each in code if asks.offset < each.offset < asks.argval]
    return body, [each for each in code if each.offset >= asks.argval]


def _statements(code: list[dis.Instruction]) -> Iterator[list[dis.Instruction]]:
    """Yield the instructions up to each that stores a value, or ends a statement in another way."""
    statement: list[dis.Instruction] = []
    for each in code:
        statement.append(each)
        if each.opname.startswith(("STORE_", "POP_", "JUMP_", "RETURN_", "YIELD_")):
            yield statement
            statement = []


def _names_loaded(statement: list[dis.Instruction]) -> set[str]:
    return {str(word) for each in statement if each.opname.startswith("LOAD_") for word in _names(each)}


def _set_by(statement: list[dis.Instruction]) -> str:
    """Return the name of the variable or attribute, or the key, that a statement sets; none where it sets nothing."""
    if statement[-1].opname != "STORE_SUBSCR":
        return str(_names(statement[-1])[0]) if statement[-1].opname.startswith("STORE_") else ""
    keys = [each.argval for each in statement if each.opname == "LOAD_CONST" and isinstance(each.argval, str)]
    return keys[0] if keys else "a sum"


def _operator(instruction: dis.Instruction) -> str:
    """Return ``+=``, ``*`` or ``/``, where the instruction is such a one; Python 3.10 has one for each."""
    return _OPERATORS.get(instruction.opname, instruction.argrepr)


def _names(instruction: dis.Instruction) -> tuple[Any, ...]:
    """Return the variables of an instruction; newer Pythons load and store two at once."""
    return instruction.argval if isinstance(instruction.argval, tuple) else (instruction.argval,)


def puts_together(core: Replica) -> bool:
    """Tell whether the script puts together what its replicas compute: it adds up, meets, or speaks of that."""
    return core.sums.are_kept or core.loops.puts_together or combines_processes()


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
