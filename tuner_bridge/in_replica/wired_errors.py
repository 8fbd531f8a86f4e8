"""Exceptions as JSON between driver and replicas.

What is raised on the other side is of the same type where that type is known there, with the same arguments and words.
Nothing is imported for it and no code of a user's class runs: a replica cannot make the driver run code. An exception
is made by the constructor of the builtin class that it derives from.
"""

from __future__ import annotations

import builtins
import sys
from collections.abc import Mapping
from typing import Any

from tuner_bridge.errors import RemoteTrialError
from tuner_bridge.in_replica.wire import decode_value, encode_value

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
        BaseException.add_note(error, str(decode_value(note)))
    return error


def _made_again(document: Mapping[str, Any]) -> Exception | None:
    kind = _known_type(str(document["module"]), str(document["name"]))
    if kind is None:
        return None
    base: Any = next(each for each in type.mro(kind) if each.__module__ == "builtins")
    try:
        arguments = tuple(decode_value(argument) for argument in document["arguments"])
        error: Exception
        if issubclass(base, BaseExceptionGroup):
            members = [decode_exception(member) for member in document["members"]]
            return base.__new__(kind, *arguments, members)  # type: ignore[no-any-return]
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
