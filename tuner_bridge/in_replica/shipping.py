"""An objective travels to its replicas by import path: no code is serialised, so what runs is what is on disk.

A function of the script that was started is found again by running that script under another name than ``__main__``.
"""

from __future__ import annotations

import inspect
import os
import sys
import sysconfig
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trials.inside.user_code import SCRIPT_NAME, load
from tuner_bridge.errors import InvalidSweep
from tuner_bridge.in_replica.main_globals import given_under_main, put_into


@dataclass(frozen=True, slots=True, kw_only=True)
class ShippedFunction:
    """Where to find a function again: in a module, or in the script at ``main_path``."""

    module: str
    qualname: str
    main_path: str | None
    given: Mapping[str, Any] = field(default_factory=dict)
    """Globals of the script that its replicas would not have, encoded; see main_globals."""

    @property
    def loaded_as(self) -> str:
        return self.main_path or self.module

    def to_json(self) -> dict[str, Any]:
        return {
            "module": self.module,
            "qualname": self.qualname,
            "main_path": self.main_path,
            "given": dict(self.given),
        }

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> ShippedFunction:
        return cls(
            module=document["module"],
            qualname=document["qualname"],
            main_path=document["main_path"],
            given=document.get("given", {}),
        )


class TypedIn(InvalidSweep):
    """The function is in no file; a notebook has the cells that define it."""


def ship(function: Any) -> ShippedFunction:
    """How to find ``function`` in another process; raises InvalidSweep for what cannot be found by name."""
    if function is None or not callable(function):
        raise InvalidSweep(f"the objective is {function!r}; pass a function that takes a trial and returns its value")
    if not inspect.isfunction(function):
        raise InvalidSweep(
            f"the objective is {_kind_of(function)}; replicas import it by name, so it must be a plain function at the "
            "top level of a module. Wrap it: `def objective(trial): return ...`"
        )
    name = function.__qualname__
    if "<lambda>" in name:
        raise InvalidSweep(
            "the objective is a lambda; replicas import it by name. Write `def objective(trial): ...` at the top level "
            "of the script"
        )
    if "<locals>" in name:
        raise InvalidSweep(
            f"the objective {name} is defined inside another function, so replicas cannot import it. Move it to the "
            "top level of the script, and what it closes over into module variables or trial.suggest_*"
        )
    if "." in name:
        raise InvalidSweep(
            f"the objective {name} is a method; replicas import a plain function. Write one that calls it"
        )
    module = sys.modules.get(function.__module__)
    if getattr(module, name, None) is not function:
        raise InvalidSweep(
            f"{function.__module__}.{name} is not the function that was passed (decorated or redefined?); replicas "
            "would import the other one. Pass the function that the name stands for"
        )
    if function.__module__ not in ("__main__", SCRIPT_NAME):
        return ShippedFunction(module=function.__module__, qualname=name, main_path=None)
    spec = getattr(module, "__spec__", None)
    if spec is not None and spec.name and spec.name != "__main__":
        return ShippedFunction(module=spec.name, qualname=name, main_path=None)
    path = getattr(module, "__file__", None)
    if path is None or not os.path.exists(path):
        raise TypedIn(
            f"the objective {name} was typed into an interactive session, where replicas cannot import it. Put it into "
            "a .py file next to where you are and import it from there"
        )
    assert isinstance(function, types.FunctionType)
    given = given_under_main(Path(path), function)
    return ShippedFunction(module="__main__", qualname=name, main_path=os.path.abspath(path), given=given)


def receive(shipped: ShippedFunction) -> Callable[..., Any]:
    """The function, in a replica."""
    function: types.FunctionType = getattr(load(shipped.loaded_as), shipped.qualname)
    put_into(function.__globals__, shipped.given)
    return function


def installed_modules_of(function: Callable[..., Any]) -> tuple[str, ...]:
    """Installed packages that the function's module uses: worth importing before replicas are started.

    Only those count; a fork server keeps them for all studies.
    """
    names: set[str] = set()
    for value in vars(inspect.getmodule(function) or types.ModuleType("none")).values():
        name = value.__name__ if inspect.ismodule(value) else getattr(value, "__module__", None)
        if isinstance(name, str) and name in sys.modules:
            names.add(name)
    files = {name: getattr(sys.modules[name], "__file__", None) for name in names if not name.startswith("_")}
    return tuple(sorted(name for name, file in files.items() if file is not None and lies_among_installed(file)))


def lies_among_installed(path: str) -> bool:
    """Whether a package's installer put this file there; those of an editable install are the user's, and change."""
    folders = tuple(os.path.realpath(sysconfig.get_path(kind)) + os.sep for kind in ("purelib", "platlib"))
    return os.path.realpath(path).startswith(folders)


def _kind_of(function: Any) -> str:
    if inspect.ismethod(function):
        return f"the bound method {function.__qualname__}"
    if type(function).__name__ == "partial":
        return "a functools.partial"
    return f"an object of type {type(function).__name__}"
