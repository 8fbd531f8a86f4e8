"""Loads a user's code by name: a module, or the script that was started, run again under another name.

A script runs as ``__mp_main__``, as Python's own multiprocessing does it: what stands under
``if __name__ == "__main__":`` stays out.
"""

from __future__ import annotations

import functools
import importlib
import json
import os
import runpy
import sys
import types

SCRIPT_NAME = "__mp_main__"
COMMAND_LINE = "ELASTUNE_COMMAND_LINE"
"""How the script was started whose code this is, as a JSON list: its replicas see the same ``sys.argv``."""
MOVED = "ELASTUNE_MOVED"
"""Names a folder and where it is found on this machine, as OLD=NEW."""
LOADED_BY = (COMMAND_LINE, MOVED)
"""Variables that ``load`` goes by: whoever loads a replica's code for it needs them as the replica has them."""


def load(name: str) -> types.ModuleType:
    """``name``: a module's, or the absolute path of a script. Raises what Python does, with what to do about it."""
    take_command_line()
    try:
        return _run(moved_path(name)) if os.path.isabs(name) else importlib.import_module(name)
    except ModuleNotFoundError as error:
        image = os.environ.get("ELASTUNE_IMAGE")
        if not image:
            raise
        raise ModuleNotFoundError(
            f"{error}: the image {image} does not have it. Replicas import the objective by name: build an image with "
            "that module, mount a volume that has it and name its path with ELASTUNE_CODE, or start the sweep in the "
            "folder that holds it, which is then packed",
            name=error.name,
        ) from error
    except FileNotFoundError as error:
        image = os.environ.get("ELASTUNE_IMAGE")
        if not image or error.filename != moved_path(name):
            raise
        raise FileNotFoundError(
            f"the script {error.filename} is not in the image {image}; name the folder that holds it there with "
            "ELASTUNE_CODE, or leave that variable out to have the working folder packed"
        ) from error


def take_command_line() -> None:
    """Have ``sys.argv`` be that of the script that was started, where the trial says so."""
    words = os.environ.get(COMMAND_LINE)
    if words is not None:
        first, *rest = json.loads(words)
        sys.argv = [moved_path(first), *rest]


def moved_path(path: str) -> str:
    """Where a path of the machine that the sweep was started on is found here."""
    old, _, new = os.environ.get(MOVED, "").partition("=")
    return moved(path, old, new) if old else path


def moved(path: str, old: str, new: str) -> str:
    """Where a path is found whose folder ``old`` has become ``new``."""
    if path == old or path.startswith(old.rstrip("/") + "/"):
        return new.rstrip("/") + path[len(old.rstrip("/")) :]
    return path


@functools.cache
def _run(path: str) -> types.ModuleType:
    """The script as a module that both names for it lead to; run once in a process."""
    module = types.ModuleType(SCRIPT_NAME)
    module.__file__ = path
    sys.modules["__main__"] = sys.modules[SCRIPT_NAME] = module
    module.__dict__.update(runpy.run_path(path, run_name=SCRIPT_NAME))
    return module
