"""Hooks: calls when a name of a package is used, a module imported, training begun, or metrics told by a trainer."""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.util
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


def loaded_on_use(package: str, homes: Mapping[str, str]) -> Callable[[str], Any]:
    """Return a ``__getattr__`` for the package that imports a name from its module when it is first used.

    ``homes`` gives the modules, relative to the package where they begin with a dot.
    """

    def load(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(importlib.import_module(homes[name], package), name)

    return load


def when_imported(name: str, then: Callable[[], object]) -> None:
    """Call ``then`` in the thread that imports the module, before its import statement goes on.

    A later call for the same name takes the place of an earlier one.
    """
    sys.meta_path[:] = [finder for finder in sys.meta_path if not (isinstance(finder, _Finder) and finder.name == name)]
    sys.meta_path.insert(0, _Finder(name, then))


class _Finder(importlib.abc.MetaPathFinder):
    def __init__(self, name: str, then: Callable[[], object]) -> None:
        self.name = name
        self._callback = then

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self.name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def execute_and_tell(module: ModuleType) -> None:
            execute(module)
            self._callback()

        # Of this very import: each search makes a loader of its own.
        spec.loader.exec_module = execute_and_tell  # type: ignore[method-assign]  # this import only
        return spec


_calls: list[Callable[[], object]] = []


def at_first_step(call: Callable[[], object]) -> None:
    """Register a call. Who trains nothing never makes it."""
    _calls.append(call)


def first_step_begins() -> None:
    """Make the registered calls, each once."""
    while _calls:
        _calls.pop(0)()


MetricsListener = Callable[[Mapping[str, float], int, str | None], None]
"""Is given the metrics by name, the step, which means the same in all trials, and the metric that the user chose."""

_listener: MetricsListener | None = None


def listen_to_metrics(listener: MetricsListener | None) -> None:
    """Listen to metrics, on every replica at the same places; ``listener`` may raise what ends the trial."""
    global _listener
    _listener = listener


def tell_metrics(metrics: Mapping[str, float], *, step: int, chosen: str | None = None) -> None:
    """Tell metrics that are the same on all replicas; collective."""
    if _listener is not None:
        _listener(metrics, step, chosen)
