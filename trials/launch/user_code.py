"""Loads a user's code by name: a module, or the script that was started, run again under another name.

A script runs as ``__mp_main__``, as Python's own multiprocessing does it: what stands under
``if __name__ == "__main__":`` stays out.
"""

from __future__ import annotations

import functools
import importlib
import os
import runpy
import sys
import types

SCRIPT_NAME = "__mp_main__"


def load(name: str) -> types.ModuleType:
    """``name``: a module's, or the absolute path of a script."""
    return _run(name) if os.path.isabs(name) else importlib.import_module(name)


@functools.cache
def _run(path: str) -> types.ModuleType:
    """The script as a module that both names for it lead to; run once in a process."""
    module = types.ModuleType(SCRIPT_NAME)
    module.__file__ = path
    sys.modules["__main__"] = sys.modules[SCRIPT_NAME] = module
    module.__dict__.update(runpy.run_path(path, run_name=SCRIPT_NAME))
    return module
