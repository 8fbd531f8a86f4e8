"""Plain data of the user's modules, so that replicas find what the driver has set there.

A replica imports these modules anew: ``settings.EPOCHS = 50`` in a script would be lost. The driver tells what it has
(``gather``), a replica sets what differs (``set_values``). On another machine some values rightly differ, such as
paths, or whether there is a GPU: there, those alone are set that are surely not what the module's own source says.
"""

from __future__ import annotations

import argparse
import ast
import functools
import importlib
import logging
import os
import pathlib
import pickle
import sys
import sysconfig
import types
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, is_dataclass
from typing import Any

from trials.inside.imports import OUR_PACKAGES, installed_folders, package_of

LARGEST_BYTES = 1 << 20
"""Largest value to send; what is larger was read from somewhere, and is read again."""
DEEPEST = 20
_PLAIN = (bool, int, float, complex, str, bytes, type(None), range)

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Value:
    """A value that the driver has set in a module, and the place to set it in a replica.

    ``owner``: names that lead from the module to the class it is an attribute of; empty: a global.
    """

    owner: tuple[str, ...]
    name: str
    content: bytes
    """Pickled: what it is made of is imported where it is set alone."""
    is_certain: bool
    """It is not what the module's source says."""


ModuleValues = Mapping[str, Sequence[Value]]


# ---------------------------------------------------------------------- in the driver


def users_modules() -> dict[str, types.ModuleType]:
    """Modules of files that nobody has installed, by name, but for ``__main__`` and our own."""
    modules = {}
    for name, module in sys.modules.copy().items():
        file = getattr(module, "__file__", None)
        if name == "__main__" or not isinstance(file, str) or package_of(name) in OUR_PACKAGES:
            continue
        if file.endswith(".py") and _is_users(os.path.dirname(file)):
            modules[name] = module
    return modules


@functools.cache
def _is_users(folder: str) -> bool:
    """Asked for each folder once: there are thousands of modules, and each look goes to the disk."""
    return not (os.path.realpath(folder) + os.sep).startswith((*installed_folders(), *_standard_library()))


@functools.cache
def _standard_library() -> tuple[str, ...]:
    return tuple(os.path.realpath(sysconfig.get_path(kind)) + os.sep for kind in ("stdlib", "platstdlib"))


def gather(modules: Mapping[str, types.ModuleType]) -> dict[str, list[Value]]:
    """Plain data that these modules and their classes hold."""
    values_by_module: dict[str, list[Value]] = {}
    for name, module in modules.items():
        values = list(_values_of((), vars(module), _Source.of(module.__file__ or ""), name, modules))
        if values:
            values_by_module[name] = values
    return values_by_module


def _values_of(
    owner: tuple[str, ...], scope: Mapping[str, Any], source: _Source, module: str, modules: Collection[str]
) -> Iterator[Value]:
    for name, value in list(scope.items()):
        if name.startswith("__"):
            continue
        if isinstance(value, type):
            if value.__module__ == module and len(owner) < DEEPEST and value.__name__ == name:
                yield from _values_of((*owner, name), vars(value), source.inner(name), module, modules)
        elif _is_plain(value, modules):
            content = _pickled(value)
            if content is not None and len(content) <= LARGEST_BYTES:
                yield Value(owner, name, content, source.denies(name, value))


def _is_plain(value: Any, modules: Collection[str], depth: int = 0) -> bool:
    """Tell whether it is data and nothing else, perhaps in an object of a class of the user's."""
    if depth > DEEPEST:
        return False
    if type(value) in _PLAIN or isinstance(value, pathlib.PurePath):
        return True
    inner: Iterable[Any]
    if type(value) in (list, tuple, set, frozenset):
        inner = value
    elif type(value) is dict:
        inner = (each for pair in value.items() for each in pair)
    elif _is_bag(value) or (is_dataclass(value) and type(value).__module__ in modules and hasattr(value, "__dict__")):
        inner = vars(value).values()
    else:
        return False
    return all(_is_plain(each, modules, depth + 1) for each in inner)


def _is_bag(value: Any) -> bool:
    return type(value) in (argparse.Namespace, types.SimpleNamespace)


def _pickled(value: Any) -> bytes | None:
    """Pickle a value; None for what its class, or its depth, forbids to pickle."""
    try:
        return pickle.dumps(value, protocol=5)
    except Exception:
        return None


class _Source:
    """Values that a module's or a class's own lines give its names."""

    def __init__(self, statements: Sequence[ast.stmt] | None) -> None:
        self._is_known = statements is not None
        self._classes: dict[str, Sequence[ast.stmt]] = {}
        self._literals: dict[str, Any] = {}
        self._unclear: set[str] = set()
        self._has_star = False
        for statement in statements or ():
            self._note(statement)

    @classmethod
    def of(cls, path: str) -> _Source:
        try:
            return _read(path, os.stat(path).st_mtime_ns)
        except (OSError, SyntaxError, ValueError):
            return cls(None)

    def inner(self, name: str) -> _Source:
        """Return the names of a class of that name."""
        return _Source(self._classes.get(name))

    def denies(self, name: str, value: Any) -> bool:
        """Tell whether the value is surely another one than these lines give."""
        if not self._is_known or name in self._unclear:
            return False
        if name not in self._literals:
            # It was put there from outside.
            return not self._has_star
        literal = self._literals[name]
        return type(literal) is not type(value) or (literal != value and _pickled(literal) != _pickled(value))

    def _note(self, statement: ast.stmt) -> None:
        targets: list[ast.expr] = []
        if isinstance(statement, ast.Assign):
            targets = statement.targets
        elif isinstance(statement, ast.AnnAssign) and statement.value is not None:
            targets = [statement.target]
        names = [target.id for target in targets if isinstance(target, ast.Name)]
        if targets and len(names) == len(targets):
            assert isinstance(statement, ast.Assign | ast.AnnAssign)
            assert statement.value is not None
            for name in names:
                try:
                    self._literals[name] = ast.literal_eval(statement.value)
                except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
                    self._unclear.add(name)
            return
        if isinstance(statement, ast.ImportFrom) and any(each.name == "*" for each in statement.names):
            self._has_star = True
        if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            self._unclear.add(statement.name)
            if isinstance(statement, ast.ClassDef):
                self._classes[statement.name] = statement.body
            return
        for node in ast.walk(statement):
            if isinstance(node, ast.Name):
                # Stored, or perhaps changed by a call: CONFIG.update(...).
                self._unclear.add(node.id)
            elif isinstance(node, ast.alias):
                self._unclear.add((node.asname or node.name).partition(".")[0])
            elif isinstance(node, ast.Global):
                self._unclear.update(node.names)


@functools.lru_cache(maxsize=1024)
def _read(path: str, changed_at: int) -> _Source:
    """Read a file once for all sweeps of a process, as long as nobody changes it."""
    return _Source(ast.parse(pathlib.Path(path).read_bytes()).body)


# ---------------------------------------------------------------------- in a replica


def set_values(values: ModuleValues, *, same_machine: bool) -> None:
    """Give modules, imported where they are not yet, what the driver has in them."""
    for name, of_module in values.items():
        wanted = [value for value in of_module if value.is_certain or (same_machine and name in sys.modules)]
        if not wanted:
            continue
        try:
            module = importlib.import_module(name)
        except Exception as error:
            logger.warning("the script has changed the module %s, which cannot be imported here: %s", name, error)
            continue
        for value in wanted:
            owner: Any = module
            for step in value.owner:
                owner = vars(owner).get(step)
            if owner is not None:
                _set(owner, value.name, value.content)


def _set(owner: Any, name: str, content: bytes) -> None:
    """Set a value; what other modules have imported from there, and can change, stays the same object."""
    before = vars(owner).get(name, _NOTHING)
    if _pickled(before) == content:
        return
    value = pickle.loads(content)  # noqa: S301  # from the driver, which started us
    if type(before) is not type(value):
        setattr(owner, name, value)
    elif isinstance(value, list):
        before[:] = value
    elif isinstance(value, dict | set):
        before.clear()
        before.update(value)
    elif _is_bag(value) or is_dataclass(value):
        vars(before).clear()
        vars(before).update(vars(value))
    else:
        setattr(owner, name, value)


_NOTHING = object()
