"""Scripts of tests and examples, run as a user runs them."""

from __future__ import annotations

import multiprocessing
import os
import runpy
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from tests.support.project import ROOT


def run_python(
    folder: Path,
    *arguments: str | bytes,
    environ: Mapping[str, str] = MappingProxyType({}),
    succeeds: bool = True,
    clean: bool = False,
) -> subprocess.CompletedProcess[str]:
    """This Python in a folder.

    ``succeeds``: fails unless it does. ``clean``: without variables of ours, such as a scheduler's address.
    """
    present = {name: value for name, value in os.environ.items() if not (clean and name.startswith("ELASTUNE_"))}
    own = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env={**present, **own, **environ},
        capture_output=True,
        text=True,
        timeout=300.0,
        check=False,
    )
    assert done.returncode == 0 or not succeeds, done.stdout[-3000:] + done.stderr[-6000:]
    return done


def forked(module: str, environ: Mapping[str, str]) -> Any:
    """A process that runs a module as ``python -m`` does, with torch in memory from its start."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["dist_core.replica_preload"])
    process = context.Process(target=_run_module, args=(module, {"OMP_NUM_THREADS": "1", **environ}))
    process.start()
    return process


def run_forked(module: str, **environ: str) -> None:
    """Run a module in such a process, until it has succeeded."""
    process = forked(module, environ)
    process.join(120.0)
    assert process.exitcode == 0, f"{module} ended with {process.exitcode}"


def _run_module(module: str, environ: Mapping[str, str]) -> None:
    os.environ.update(environ)
    runpy.run_module(module, run_name="__main__")
