"""Values as JSON between driver and replicas. No pickle: the driver does not trust its replicas.

What an objective sets on its trial arrives as it was: numbers bit for bit, NumPy arrays and scalars with their type,
tuples, sets, bytes, and dictionaries whatever their keys. What cannot travel is refused where it is set.
"""

from __future__ import annotations

import base64
import builtins
import math
import sys
from collections.abc import Mapping
from typing import Any

from dist_core.older_python import BaseExceptionGroup, add_note
from tuner_bridge.errors import InvalidValue, RemoteTrialError

_BASES = ("builtins", "exceptiongroup")
"""Modules of exceptions that others derive theirs from."""
NOT_A_NUMBER = "NotANumber"
"""Type of the error of a trial that diverged: its value is none, and nothing was raised."""
DEEPEST = 60
"""Lists and dictionaries within each other; the scheduler reads no deeper JSON."""
LARGEST_ARRAY_BYTES = 16 * 1024**2
_ARRAY_KINDS = "biufcUSMm"
"""NumPy's kinds of plain data: no objects, which only pickle could bring."""


def encode_value(value: Any, *, lenient: bool = False, depth: int = 0) -> Any:
    """Encode a value as JSON; raise InvalidValue for what has no form that the other side could trust.

    ``lenient``: for words and not for data; puts the printed text in place of what cannot travel.
    """

    def inner(item: Any) -> Any:
        return encode_value(item, lenient=lenient, depth=depth + 1)

    try:
        if depth > DEEPEST:
            raise InvalidValue(f"a value is nested more than {DEEPEST} deep; flatten it, or keep it in a file")
        if _is_numpys(value):
            return _array(value)
        if value is None or isinstance(value, (bool, int, float)):
            return value if value is None or isinstance(value, bool) else _number(value)
        if isinstance(value, str):
            return _text(value)
        if isinstance(value, list):
            return [inner(item) for item in value]
        for name, kind in (("tuple", tuple), ("set", set), ("frozenset", frozenset)):
            if isinstance(value, kind):
                return {name: [inner(item) for item in value]}
        if isinstance(value, Mapping):
            pairs = [[inner(key), inner(item)] for key, item in value.items()]
            return {"object": dict(pairs)} if all(isinstance(key, str) for key, _ in pairs) else {"pairs": pairs}
        if isinstance(value, (bytes, bytearray)):
            return {"bytes": base64.b64encode(bytes(value)).decode()}
        if isinstance(value, complex):
            return {"complex": [repr(value.real), repr(value.imag)]}
        raise InvalidValue(
            f"a {type(value).__module__}.{type(value).__qualname__} cannot be sent from a replica to its study: "
            "numbers, text, bytes, None, NumPy arrays, and lists, tuples, sets and dictionaries of them can. "
            f"Convert it (a tensor by .tolist() or .numpy()), or keep it in a file: {value!r:.120}"
        )
    except InvalidValue as error:
        if not lenient and not depth:
            # Without the way down to where it is.
            raise InvalidValue(str(error)) from None
        if not lenient:
            raise
        return {"text": repr(value)[:500]}


def encode_result(value: Any) -> Any:
    """Encode an objective's result: Optuna takes one or several numbers of any type, and refuses the rest."""
    if isinstance(value, (list, tuple)):
        return [encode_result(item) for item in value]
    if value is None or isinstance(value, (bool, str)):
        return value
    try:
        return _number(float(value))
    except (TypeError, ValueError, OverflowError):
        return encode_value(value, lenient=True)


def is_nan(result: Any) -> bool:
    """Tell whether a result is not a number, or holds one that is not: Optuna takes that for a failure."""
    results = result if isinstance(result, (list, tuple)) else [result]
    try:
        return any(each is not None and math.isnan(float(each)) for each in results)
    except (TypeError, ValueError, OverflowError):
        return False


def decode_value(value: Any) -> Any:
    if isinstance(value, list):
        return [decode_value(item) for item in value]
    if not isinstance(value, dict):
        return value
    [(form, content)] = value.items()
    return _DECODERS[form](content)


_DECODERS: dict[str, Any] = {
    "float": float,
    "text": str,
    "surrogates": lambda content: base64.b64decode(content).decode("utf-8", "surrogatepass"),
    "object": lambda content: {key: decode_value(item) for key, item in content.items()},
    "pairs": lambda content: {decode_value(key): decode_value(item) for key, item in content},
    "tuple": lambda content: tuple(decode_value(item) for item in content),
    "set": lambda content: {decode_value(item) for item in content},
    "frozenset": lambda content: frozenset(decode_value(item) for item in content),
    "bytes": base64.b64decode,
    "complex": lambda content: complex(float(content[0]), float(content[1])),
    "array": lambda content: _decoded_array(content),
}


def _number(value: Any) -> Any:
    if isinstance(value, int):
        return int(value)
    number = float(value)
    return number if math.isfinite(number) else {"float": repr(number)}


def _text(value: str) -> Any:
    """File names may hold bytes that are no text; Python keeps them as halves of pairs, which UTF-8 does not know."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return {"surrogates": base64.b64encode(value.encode("utf-8", "surrogatepass")).decode()}
    # What it is as a text: of a member of an enumeration, str() gives the name.
    return str.__str__(value)


def _is_numpys(value: Any) -> bool:
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, (numpy.ndarray, numpy.generic))


def _array(value: Any) -> Any:
    if value.dtype.kind not in _ARRAY_KINDS or value.dtype.hasobject:
        raise InvalidValue(
            f"a NumPy array of type {value.dtype} cannot be sent from a replica to its study; convert it to numbers "
            "or text, or keep it in a file"
        )
    if value.nbytes > LARGEST_ARRAY_BYTES:
        raise InvalidValue(
            f"a NumPy array of {value.nbytes} bytes is too large for an attribute; the most is {LARGEST_ARRAY_BYTES}. "
            "Keep it in a file, or as an artifact"
        )
    document = {
        "type": value.dtype.str,
        "shape": list(value.shape),
        "data": base64.b64encode(value.tobytes()).decode(),
    }
    return {"array": {**document, "scalar": isinstance(value, sys.modules["numpy"].generic)}}


def _decoded_array(document: Mapping[str, Any]) -> Any:
    import numpy as np

    kind = np.dtype(document["type"])
    if kind.hasobject:
        raise InvalidValue(f"an array of type {document['type']} is not plain data")
    array = np.frombuffer(base64.b64decode(document["data"]), dtype=kind).reshape(document["shape"])
    return array[()] if document["scalar"] else array.copy()


DEEPEST_GROUP = 8
MOST_MEMBERS = 64
LONGEST_WORDS = 100_000
_FILE_FIELDS = ("errno", "strerror", "filename", "filename2")


def encode_exception(error: BaseException, *, depth: int = 0) -> dict[str, Any]:
    """Type by name, arguments, words and notes; of a group its members, of an error with a file its names."""
    kind = type(error)
    document = {
        "module": kind.__module__,
        "name": kind.__qualname__,
        "message": encode_value(_words(error)),
        "arguments": [_encoded(argument) for argument in error.args],
        "notes": [encode_value(str(note)[:LONGEST_WORDS]) for note in getattr(error, "__notes__", ())],
    }
    if isinstance(error, BaseExceptionGroup):
        members = error.exceptions[:MOST_MEMBERS] if depth < DEEPEST_GROUP else ()
        # Its arguments are its members once more.
        document["arguments"] = [encode_value(str(error.message)[:LONGEST_WORDS])]
        document["members"] = [encode_exception(member, depth=depth + 1) for member in members]
    elif isinstance(error, OSError):
        document["file"] = [_encoded(getattr(error, field)) for field in _FILE_FIELDS]
    return document


def decode_exception(document: Mapping[str, Any]) -> Exception:
    """Return the exception that was encoded; a RemoteTrialError with its words where it cannot be made again."""
    error = _made_again(document)
    if error is None:
        error = RemoteTrialError(f"{document['name']}: {decode_value(document['message'])}")
    for note in document.get("notes", ()):
        add_note(error, str(decode_value(note)))
    return error


def _made_again(document: Mapping[str, Any]) -> Exception | None:
    kind = _known_type(str(document["module"]), str(document["name"]))
    if kind is None:
        return None
    base: Any = next(each for each in type.mro(kind) if each.__module__ in _BASES)
    try:
        arguments = tuple(decode_value(argument) for argument in document["arguments"])
        error: Exception
        if issubclass(base, BaseExceptionGroup):
            members = [decode_exception(member) for member in document["members"]]
            return base.__new__(kind, *arguments, members)  # type: ignore[no-any-return]  # an exception of that class
        file = tuple(map(decode_value, document.get("file", ())))
        has_file = len(file) == len(_FILE_FIELDS) and file[0] is not None
        given = (*file[:3], None, file[3]) if has_file else arguments
        error = base.__new__(kind, *given)
        # Which of the two an OSError reads depends on what its subclass has of its own.
        base.__init__(error, *given)
        # Past what a user's class may have in its place.
        BaseException.__dict__["args"].__set__(error, arguments)
    except Exception:
        # Whatever does not fit came from a version, or a replica, that is not ours: its words are left.
        return None
    return error


def _known_type(module_name: str, name: str) -> type[Exception] | None:
    """Return a class of this process by its name.

    Looked up without asking the module, which could answer by code.
    """
    module = builtins if module_name == "builtins" else sys.modules.get(module_name)
    kind = None if module is None else vars(module).get(name)
    return kind if isinstance(kind, type) and Exception in type.mro(kind) else None


def _words(error: BaseException) -> str:
    """Return the error's text; a class of the user's may fail at that."""
    try:
        return str(error)[:LONGEST_WORDS]
    except Exception as failure:
        return f"(its message cannot be read: {type(failure).__name__})"


def _encoded(argument: Any) -> Any:
    if isinstance(argument, (str, bytes)) and len(argument) > LONGEST_WORDS:
        argument = argument[:LONGEST_WORDS]
    return encode_value(argument, lenient=True)
