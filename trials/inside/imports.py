"""Modules that a replica has imported and that others of its code may share: those of installed packages.

A user's own modules are never shared: they may change between two replicas, and another study may have others of the
same names.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import site
import sys
import sysconfig
from collections.abc import Collection, Iterable

OUR_PACKAGES = ("dist_core", "trials", "scheduler", "tuner_bridge")
"""Our packages, which count as installed, as torch does, also where they are imported from a checkout."""

_OF_ONE_REPLICA = ("nni", "tuner_bridge.nni")
"""NNI's package looks at variables that a replica sets for itself; ours of that name import it."""

_QUOTED = re.compile(rb"[\"']([A-Z][A-Z0-9_]+)[\"']")


def package_of(module: str) -> str:
    """Name of the top-level package that a module belongs to."""
    return module.partition(".")[0]


def installed_modules(beyond: Collection[str]) -> list[str]:
    """Names of this process's installed modules that are not among ``beyond``, in the order of their import."""
    return [name for name in list(sys.modules) if name not in beyond and _is_installed(name)]


def variables_named_in(modules: Iterable[str]) -> set[str]:
    """Return constants in the code of these modules that may be variables of the environment, or begin one.

    A package that looks at a variable names it, or what it begins with (``TQDM_``). What libraries in C read is not
    seen.
    """
    names: set[str] = set()
    for module in modules:
        spec = getattr(sys.modules.get(module), "__spec__", None)
        if spec is not None and str(spec.origin).endswith(".py"):
            with contextlib.suppress(OSError), open(spec.origin, "rb") as source:
                names |= {word.decode() for word in _QUOTED.findall(source.read())}
    return names


def is_named(variable: str, names: Collection[str]) -> bool:
    """Return whether a variable, or a beginning of its name up to an underscore, is among these constants."""
    return variable in names or any(
        variable[: at + 1] in names for at, letter in enumerate(variable) if letter == "_" and at > 0
    )


def forget_shadowed(python_path: Iterable[str]) -> None:
    """Forget modules in memory for which a folder that the replica's code comes from has another one of that name.

    A folder of packages that was put on the path may have the very ones in memory: those stay.
    """
    shadowing: set[str] = set()
    for folder in python_path:
        if (os.path.realpath(folder) + os.sep).startswith(installed_folders()):
            continue
        try:
            entries = list(os.scandir(folder or "."))
        except OSError:
            continue
        found = {each.name.removesuffix(".py"): each.path for each in entries if each.name.endswith(".py")}
        inits = {each.name: os.path.join(each.path, "__init__.py") for each in entries}
        found |= {name: path for name, path in inits.items() if os.path.isfile(path)}
        shadowing |= {name for name, path in found.items() if not _is_in_memory(name, path)}
    for name in list(sys.modules):
        if package_of(name) in shadowing and package_of(name) not in OUR_PACKAGES and _is_installed(name):
            del sys.modules[name]


def _is_in_memory(package: str, path: str) -> bool:
    origin = getattr(getattr(sys.modules.get(package), "__spec__", None), "origin", None)
    return isinstance(origin, str) and os.path.realpath(origin) == os.path.realpath(path)


def lies_among_installed(path: str) -> bool:
    """Tell whether a package's installer put this file there.

    Files of an editable install are the user's, and change.
    """
    return os.path.realpath(path).startswith(installed_folders())


def _is_installed(name: str) -> bool:
    if name.startswith(_OF_ONE_REPLICA):
        return False
    if package_of(name) in (*OUR_PACKAGES, "torch"):
        return True
    spec = getattr(sys.modules.get(name), "__spec__", None)
    if spec is None or spec.name != name or not isinstance(spec.origin, str):
        return False
    return lies_among_installed(spec.origin)


@functools.cache
def installed_folders() -> tuple[str, ...]:
    """Folders that packages are installed into, each ending with a separator."""
    known = [sysconfig.get_path("purelib"), sysconfig.get_path("platlib"), site.getusersitepackages()]
    return tuple({os.path.realpath(each) + os.sep for each in (*known, *site.getsitepackages())})
