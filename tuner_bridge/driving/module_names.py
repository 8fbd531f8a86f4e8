"""Check that a new process would find a module of this one under its name."""

from __future__ import annotations

import os
import sys
from typing import Any


def is_found_by_name(name: str, file: str) -> bool:
    """Tell whether importing ``name`` from this process's folders gives the module of that file."""
    path: Any = None
    spec = None
    parts = name.split(".")
    for count in range(1, len(parts) + 1):
        spec = _spec_of(".".join(parts[:count]), path)
        if spec is None:
            return False
        path = spec.submodule_search_locations
    origin = getattr(spec, "origin", None)
    return isinstance(origin, str) and bool(file) and os.path.realpath(origin) == os.path.realpath(file)


def _spec_of(name: str, path: Any) -> Any:
    for finder in sys.meta_path:
        find = getattr(finder, "find_spec", None)
        spec = None if find is None else find(name, path)
        if spec is not None:
            return spec
    return None
