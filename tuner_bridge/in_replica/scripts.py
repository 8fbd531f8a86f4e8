"""A training script, with its arguments, as what the trials of a sweep run."""

from __future__ import annotations

import ast
import os
import re
import runpy
import shlex
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

from dist_core.errors import Unwinding
from trials.inside.imports import lies_among_installed
from trials.inside.user_code import moved_path
from tuner_bridge.errors import InvalidSweep


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """A training script and its arguments.

    ``path`` of a file, the name of a ``module``, or ``code``, that each replica runs as its main program.
    """

    path: str | None
    module: str | None
    arguments: tuple[str, ...]
    code: str | None = None

    def to_json(self) -> dict[str, Any]:
        return {"path": self.path, "module": self.module, "arguments": list(self.arguments), "code": self.code}

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Script:
        return cls(**{**document, "arguments": tuple(document["arguments"])})

    def run(self) -> None:
        """Run the script as Python would. Raise what it raises, and RuntimeError for an exit status other than 0."""
        try:
            self.run_here()
        except Unwinding:
            raise
        except SystemExit as leaving:
            if leaving.code not in (None, 0):
                raise RuntimeError(f"the script ended with status {leaving.code}") from leaving

    def run_here(self) -> None:
        """Run the script as this process's main program: its SystemExit is the process's."""
        if self.path is not None:
            path = moved_path(self.path)
            sys.argv = [path, *self.arguments]
            sys.path.insert(0, os.path.dirname(path))
            runpy.run_path(path, run_name="__main__")
        elif self.code is not None:
            sys.argv = ["-c", *self.arguments]
            sys.path.insert(0, "")
            main = ModuleType("__main__")
            with _as_main(main):
                exec(compile(self.code, "<string>", "exec", dont_inherit=True), main.__dict__)  # noqa: S102  # as the user has asked
        else:
            assert self.module is not None
            sys.argv = [self.module, *self.arguments]
            runpy.run_module(self.module, run_name="__main__", alter_sys=True)

    def imports(self) -> tuple[str, ...]:
        """Installed packages that the file imports at its top level: a fork server may have them in memory beforehand.

        Not the user's own modules: a script may be started from another folder than its own, and its modules may ask
        for the trial while they are imported.
        """
        if self.path is None and self.code is None:
            return ()
        try:
            tree = ast.parse(Path(self.path).read_bytes() if self.path is not None else self.code or "")
        except (OSError, SyntaxError, ValueError):
            return ()
        return installed_imports(tree.body)


def installed_imports(statements: Iterable[ast.stmt]) -> tuple[str, ...]:
    """Return the modules of installed packages that these statements import, those within them left out."""
    names: dict[str, None] = {}
    for node in statements:
        if isinstance(node, ast.Import):
            names |= dict.fromkeys(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names[node.module] = None
    return tuple(name for name in names if _is_installed(name.partition(".")[0]))


@contextmanager
def _as_main(module: ModuleType) -> Iterator[None]:
    before = sys.modules["__main__"]
    sys.modules["__main__"] = module
    try:
        yield
    finally:
        sys.modules["__main__"] = before


def _is_installed(package: str) -> bool:
    try:
        found = find_spec(package)
    except (ImportError, ValueError):
        return False
    places = [] if found is None else [found.origin or "", *(found.submodule_search_locations or ())]
    return any(lies_among_installed(place) for place in places)


def starts_python(word: str) -> bool:
    """Tell whether a command's first word is an interpreter of Python's, under any of its names."""
    return re.fullmatch(r"python(3(\.\d+)?)?", os.path.basename(word)) is not None


def is_another_python(word: str) -> bool:
    """Tell whether it names an interpreter that exists and belongs to another environment than this process's."""
    return os.sep in word and os.path.exists(word) and not is_own_python(word)


def is_own_python(path: str) -> bool:
    """Tell whether the interpreter at this path is of this process's environment."""
    return os.path.dirname(os.path.abspath(path)) == os.path.dirname(sys.executable)


def program_of(words: Sequence[str], folder: str) -> Script | None:
    """Return the program behind ``python``: a file of ``folder``, a module or code; None for Python's other options."""
    rest = words[1:] if words[:1] == ["-u"] else words
    if rest[:1] == ["-m"] and len(rest) > 1:
        return Script(path=None, module=rest[1], arguments=tuple(rest[2:]))
    if rest[:1] == ["-c"] and len(rest) > 1:
        return Script(path=None, module=None, arguments=tuple(rest[2:]), code=rest[1])
    if not rest or rest[0].startswith("-"):
        return None
    return Script(path=os.path.join(folder, rest[0]), module=None, arguments=tuple(rest[1:]))


def script(command: str | Sequence[str]) -> Script:
    """Return a script and its arguments for ``optimize``: ``script("train.py --epochs 50")``.

    Args:
        command: One text, split as a shell would, or a list of texts. A leading ``python`` is left out; ``-m module``
            and ``-c code`` work. The script calls ``tuner_bridge.current_trial()``.

    Raises:
        InvalidSweep: The file is not there.
    """
    words = shlex.split(command) if isinstance(command, str) else [str(word) for word in command]
    if words and starts_python(words[0]):
        words = words[1:]
    program = program_of(words, os.getcwd())
    if program is None:
        raise InvalidSweep(
            f"the script is {command!r}; it must name a Python file and its arguments, such as 'train.py --epochs 50'"
        )
    if program.path is None:
        return program
    path = os.path.abspath(program.path)
    if not os.path.isfile(path):
        name = words[-len(program.arguments) - 1]
        raise InvalidSweep(f"the script {name!r} does not exist (looked for {path}); name a file, or use '-m module'")
    return replace(program, path=path)
