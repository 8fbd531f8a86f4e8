"""Imports a user's code once for all replicas that will be forked from this process, or finds what forbids that.

A replica that is forked after the import has to be what it would be had it imported the code itself. So the import
may start no thread or process, open nothing and map no memory that would be shared, touch no GPU, use up no randomness,
and set up nothing in its process that a replica sets up again (variables, folder, signals); it must not read a
variable that a replica has another value for, which shows only when a replica is to be forked (`environ_reads`).
What it prints is kept for each replica's log; data that it reads is watched as its source files are (`files_read`).
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from trials.inside.user_code import load
from trials.launch.fork.environ_reads import recorded_environ
from trials.launch.fork.import_traces import traces, why_unfit
from trials.launch.fork.import_watch import (
    captured_output,
    is_the_users,
    noted_files,
    noticed_entropy,
)
from trials.launch.fork.start import FORKABLE

OURS = ("OMP_NUM_THREADS", "PYTHONPATH")
_PR_SET_PDEATHSIG = 1


class UnfitToShare(Exception):
    """The import did something that forked replicas cannot have in common."""


@dataclass(slots=True)
class SharedImport:
    printed: bytes = b""
    files_read: set[str] = field(default_factory=set)
    environ_reads: dict[str, str | None] = field(default_factory=dict)
    """Variables that the code looked at, with what it saw."""
    library_reads: dict[str, str | None] = field(default_factory=dict)
    """The same of libraries that were imported for everybody, before."""

    def stranger_to(self, environ: Mapping[str, str]) -> str | None:
        """A variable that the code read and that has another value in a replica with this environment."""
        read = (name for name, seen in self.environ_reads.items() if environ.get(name) != seen)
        return next(read, None) or self.unlike_for_libraries(environ)

    def unlike_for_libraries(self, environ: Mapping[str, str]) -> str | None:
        """A variable of such a replica that a library has seen with another value, such as where it keeps its files.

        Not one that the replica is without: some libraries look at all there are.
        """
        return next(
            (
                name
                for name, value in environ.items()
                if name in self.library_reads and self.library_reads[name] != value and not _is_ours(name)
            ),
            None,
        )


def import_for_sharing(
    user_code: Sequence[str],
    python_path: Sequence[str],
    working_dir: str,
    environ: Mapping[str, str],
    entrypoint: str,
    *,
    parent: int,
) -> SharedImport:
    """Become a process that has this code in memory; raises UnfitToShare. ``parent``: whose fork this process is."""
    _end_with_parent(signal.SIGKILL)
    if os.getppid() != parent:
        # It ended before the kernel was asked to tell.
        raise UnfitToShare("the fork server has ended")
    os.environ.clear()
    os.environ.update({**environ, **FORKABLE})
    sys.argv = [entrypoint]
    shared = SharedImport()
    began = time.time_ns()
    drawn: list[str] = []
    try:
        os.chdir(working_dir)
        sys.path[:0] = [path for path in python_path if path not in sys.path]
        before = traces()
        with (
            captured_output() as printed,
            noticed_entropy(drawn),
            noted_files(shared.files_read, drawn),
            recorded_environ(shared.environ_reads),
        ):
            for name in user_code:
                load(name)
        after = traces()
        shared.printed = printed()
    except BaseException:
        # Each replica fails on it by itself, and tells its trial.
        raise UnfitToShare(f"it could not be imported: {traceback.format_exc(limit=-1).strip()}") from None
    reason = why_unfit(before, after) or next(iter(drawn), None)
    if reason is None and any(_changed_since(path, began) for path in (*shared.files_read, *_own_sources())):
        reason = "its files changed while it was imported"
    if reason is not None:
        raise UnfitToShare(reason)
    _end_with_parent(0)
    return shared


def _is_ours(name: str) -> bool:
    """Set for each replica, or for processes that others are forked from; no library goes by it that is shared."""
    return name in OURS or name in FORKABLE or name.startswith("ELASTUNE_") or name.endswith("_VISIBLE_DEVICES")


def _own_sources() -> list[str]:
    files = (getattr(module, "__file__", None) for module in list(sys.modules.values()))
    return [path for path in files if isinstance(path, str) and is_the_users(path)]


def _changed_since(path: str, then: int) -> bool:
    try:
        return os.stat(path).st_mtime_ns > then
    except OSError:
        return True


def _end_with_parent(number: int) -> None:
    """Ask the kernel for this signal when the parent ends, so that an import that hangs is not left behind."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)
