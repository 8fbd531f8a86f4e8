"""The first code of a replica process: put the environment right, call the entrypoint, turn its end into a status.

Runs in a process forked from the fork server or, as a module with the request on standard input, in a fresh one.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import os
import random
import sys
import traceback
from collections.abc import Mapping
from typing import Any

from trials.inside.cgroups import enter_own
from trials.inside.imports import forget_shadowed
from trials.inside.user_code import take_command_line


def run_replica(request: Mapping[str, Any]) -> int:
    """Exit status of the replica: the entrypoint's integer, a SystemExit's code, or 1 with a traceback."""
    os.chdir(request["working_dir"])
    sys.path[:0] = [path for path in request["python_path"] if path not in sys.path]
    forget_shadowed(request["python_path"])
    take_command_line()
    module_name, function_name = request["entrypoint"].split(":")
    try:
        entrypoint = getattr(importlib.import_module(module_name), function_name)
        status = entrypoint()
        return status if isinstance(status, int) else 0
    except SystemExit as leaving:
        return leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)
    except BaseException:
        traceback.print_exc()
        return 1


def redirect(log: str) -> None:
    """Redirect standard input from nowhere, output and error into the replica's log."""
    nowhere = os.open(os.devnull, os.O_RDONLY)
    out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(nowhere, 0)
    os.dup2(out, 1)
    os.dup2(out, 2)
    os.close(nowhere)
    os.close(out)
    # The same objects, which code that is in memory already may have kept.
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True)


def confine(request: Mapping[str, Any]) -> None:
    """Bind this process to the cores of its slot, which children inherit."""
    if "torch" in sys.modules:
        # The fork server has set torch up with one thread. Also where it stays at one: what is called first behind a
        # fork makes torch's pool of threads anew, and two that do so at once, as backward passes start threads of
        # their own, abort the process.
        sys.modules["torch"].set_num_threads(max(1, int(request["environ"].get("OMP_NUM_THREADS", "1"))))
    cores = request["environ"].get("ELASTUNE_CORES")
    if cores:
        with contextlib.suppress(OSError):
            os.sched_setaffinity(0, [int(core) for core in cores.split(",")])


def reseed() -> None:
    """Give a forked process randomness of its own: it shares its parent's generators."""
    random.seed()
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(int.from_bytes(os.urandom(4), "little"))


def finish(status: int) -> None:
    """End without waiting for daemon threads that may sit in a request."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status & 0xFF)


if __name__ == "__main__":
    document = json.load(sys.stdin)
    redirect(document["log"])
    enter_own(document["cgroups"])
    confine(document)
    finish(run_replica(document))
