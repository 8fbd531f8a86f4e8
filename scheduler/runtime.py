"""Versions of Python and torch: a sweep and a shared scheduler's replicas may differ in them."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version

LIBRARIES = ("torch", "numpy", "optuna")


def runtime() -> dict[str, str]:
    """Return the versions of Python and of the main libraries, without importing them."""
    versions = {"python": f"{sys.version_info.major}.{sys.version_info.minor}", "prefix": sys.prefix}
    for library in LIBRARIES:
        try:
            versions[library] = version(library)
        except PackageNotFoundError:
            versions[library] = "none"
    return versions


def differences(here: Mapping[str, str], theirs: Mapping[str, str]) -> list[str]:
    """Describe what differs there; processes of one installation are not compared."""
    if here.get("prefix") == theirs.get("prefix"):
        return []
    names = ("python", *LIBRARIES)
    return [f"{name} {here[name]} here, {theirs[name]} there" for name in names if here.get(name) != theirs.get(name)]
