"""What is raised on one side arrives whole on the other, and makes nothing run there."""

from __future__ import annotations

import json
import sys
import types
from typing import Any

import pytest

from dist_core.older_python import ExceptionGroup, add_note
from tuner_bridge.errors import RemoteTrialError
from tuner_bridge.in_replica.wire import LONGEST_WORDS, decode_exception, encode_exception


def wired(error: BaseException) -> Exception:
    return decode_exception(json.loads(json.dumps(encode_exception(error))))


def raised(code: str) -> BaseException:
    try:
        exec(code)  # texts of this file
    except BaseException as error:
        return error
    raise AssertionError(f"{code} raised nothing")


class OwnError(Exception):
    def __new__(cls, *arguments: Any, **named: Any) -> OwnError:
        raise AssertionError("constructors of users' classes must not run")

    def __init__(self, number: int, *, words: str) -> None:
        raise AssertionError("constructors of users' classes must not run")


class OwnFileError(FileNotFoundError):
    def __init__(self, path: str) -> None:
        raise AssertionError("constructors of users' classes must not run")


def made(kind: type[Exception], *arguments: Any) -> Exception:
    base: Any = next(each for each in kind.__mro__ if each.__module__ == "builtins")
    error: Exception = base.__new__(kind)
    error.args = arguments
    return error


@pytest.mark.parametrize(
    "code",
    [
        "raise ValueError('bad', 3)",
        "raise ValueError",
        "{}['missing']",
        "open('/no/such/file')",
        "import os; os.rename('/no/such/file', '/another')",
        "b'caf\\xe9'.decode()",
        "'\\ud800'.encode()",
        "raise OSError('only words')",
        "raise StopIteration(3)",
        "int('x')",
        "import json; json.loads('{')",
        "raise TimeoutError",
    ],
)
def test_exceptions_keep_type_arguments_and_words(code: str) -> None:
    error = raised(code)
    twin = wired(error)
    if type(error).__module__ == "builtins":
        assert type(twin) is type(error)
        assert twin.args == error.args
        assert str(twin) == str(error)
    assert str(error) in str(twin)


def test_what_an_error_knows_beside_its_words_arrives() -> None:
    lost = wired(raised("import os; os.rename('/no/such/file', '/another')"))
    assert isinstance(lost, FileNotFoundError)
    assert (lost.errno, lost.filename, lost.filename2) == (2, "/no/such/file", "/another")
    unread = wired(raised("b'caf\\xe9'.decode()"))
    assert isinstance(unread, UnicodeDecodeError)
    assert (unread.encoding, unread.object, unread.start) == ("utf-8", b"caf\xe9", 3)
    over = wired(StopIteration(3))
    assert isinstance(over, StopIteration) and over.value == 3


def test_groups_arrive_with_their_members_and_notes() -> None:
    inner = ValueError("bad")
    add_note(inner, "seen in fold 3")
    group = wired(ExceptionGroup("several", [inner, ExceptionGroup("more", [OSError(28, "full", "/data")])]))
    assert isinstance(group, ExceptionGroup)
    assert str(group) == "several (2 sub-exceptions)"
    first, second = group.exceptions
    assert type(first) is ValueError and first.__notes__ == ["seen in fold 3"]
    assert isinstance(second, ExceptionGroup)
    assert isinstance(second.exceptions[0], OSError) and second.exceptions[0].filename == "/data"


def test_a_group_that_is_too_deep_keeps_its_words() -> None:
    error: Exception = ValueError("bad")
    for depth in range(100):
        error = ExceptionGroup(f"level {depth}", [error])
    assert "level 99" in str(wired(error))


def test_no_constructor_of_a_users_class_runs() -> None:
    own = wired(made(OwnError, 1, "x"))
    assert type(own) is OwnError and own.args == (1, "x")
    file = wired(made(OwnFileError, 2, "no file"))
    assert type(file) is OwnFileError and file.args == (2, "no file")


def test_a_module_is_not_asked_for_what_it_does_not_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    lazy = types.ModuleType("lazy")
    lazy.__getattr__ = lambda name: pytest.fail("code of a module ran")  # type: ignore[method-assign]
    monkeypatch.setitem(sys.modules, "lazy", lazy)
    document = {"module": "lazy", "name": "Error", "message": "m", "arguments": []}
    assert type(decode_exception(document)) is RemoteTrialError


def test_words_are_cut_where_nobody_would_read_them() -> None:
    assert len(json.dumps(encode_exception(ValueError("x" * 30_000_000)))) < 3 * LONGEST_WORDS


class MuteError(Exception):
    def __str__(self) -> str:
        raise ValueError("no words")


def test_an_error_that_cannot_say_what_it_is_still_arrives() -> None:
    assert type(wired(MuteError())) is MuteError


@pytest.mark.parametrize(
    ("module", "name"),
    [("no.such.module", "Error"), ("builtins", "print"), ("builtins", "SystemExit"), ("os", "system")],
)
def test_nothing_but_known_exceptions_is_rebuilt(module: str, name: str) -> None:
    document = {"module": module, "name": name, "message": "m", "arguments": ["echo"]}
    error = decode_exception(document)
    assert type(error) is RemoteTrialError
    assert str(error) == f"{name}: m"


@pytest.mark.parametrize(
    "changes",
    [
        {"arguments": [{"no": "such form"}]},
        {"name": "UnicodeDecodeError"},
        {"name": "ExceptionGroup", "arguments": ["m"], "members": []},
        {"name": "OSError", "file": [1]},
    ],
)
def test_a_document_that_does_not_fit_keeps_its_words(changes: dict[str, Any]) -> None:
    document = {"module": "builtins", "name": "ValueError", "message": "m", "arguments": ["m"], **changes}
    assert "m" in str(decode_exception(document))
