"""Imports a user's code once for all replicas that will be forked from this process, or finds what forbids that.

A replica that is forked after the import has to be what it would be had it imported the code itself. So the import
may start no thread, open nothing that would be shared, touch no GPU and use up no randomness; it must not read a
variable that a replica has another value for, which shows only when a replica is to be forked (`environ_reads`).
What it prints is kept for each replica's log.
"""

from __future__ import annotations

import ctypes
import os
import random
import signal
import sys
import threading
import traceback
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy

from trials.launch.user_code import load

_PR_SET_PDEATHSIG = 1
_GPU_IN_USE = "/dev/nvidia-uvm"
"""Opened by a process that starts CUDA, and not by one that only counts the GPUs."""


class UnfitToShare(Exception):
    """The import did something that forked replicas cannot have in common."""


@dataclass(slots=True)
class SharedImport:
    printed: bytes = b""
    environ_reads: dict[str, str | None] = field(default_factory=dict)
    """Variables that the code looked at, with what it saw."""

    def stranger_to(self, environ: Mapping[str, str]) -> str | None:
        """A variable that the code read and that has another value in a replica with this environment."""
        return next((name for name, seen in self.environ_reads.items() if environ.get(name) != seen), None)


def import_for_sharing(
    user_code: Sequence[str], python_path: Sequence[str], working_dir: str, environ: Mapping[str, str]
) -> SharedImport:
    """Become a process that has this code in memory; raises UnfitToShare."""
    _end_with_parent(signal.SIGKILL)
    os.environ.clear()
    os.environ.update(environ)
    shared = SharedImport()
    try:
        os.chdir(working_dir)
        sys.path[:0] = [path for path in python_path if path not in sys.path]
        with _captured_output() as printed, _recorded_environ(shared.environ_reads):
            before = _traces()
            for name in user_code:
                load(name)
            after = _traces()
        shared.printed = printed()
    except BaseException:
        # Each replica fails on it by itself, and tells its trial.
        raise UnfitToShare(f"it could not be imported: {traceback.format_exc(limit=-1).strip()}") from None
    reason = _why_unfit(before, after)
    if reason is not None:
        raise UnfitToShare(reason)
    _end_with_parent(0)
    return shared


@dataclass(frozen=True, slots=True)
class _Traces:
    """What an import may not change."""

    descriptors: frozenset[tuple[str, str]]
    threads: int
    children: str
    randomness: tuple[object, ...]


def _traces() -> _Traces:
    open_now = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            open_now.add((name, os.readlink(f"/proc/self/fd/{name}")))
        except OSError:
            continue  # the listing itself
    _, keys, *rest = numpy.random.get_state()
    randomness = (random.getstate(), numpy.asarray(keys).tobytes(), *rest)
    threads = max(threading.active_count(), len(os.listdir("/proc/self/task")))
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text()
    return _Traces(frozenset(open_now), threads, children, randomness)


def _why_unfit(before: _Traces, after: _Traces) -> str | None:
    opened = sorted(path for _, path in after.descriptors - before.descriptors)
    if any(path.startswith(_GPU_IN_USE) for path in opened):
        return "it starts CUDA while it is imported"
    if opened:
        return f"it opens {opened[0]} while it is imported and keeps it open"
    if after.threads > 1:
        return f"it starts threads while it is imported ({after.threads - 1})"
    if after.children != before.children:
        return "it starts processes while it is imported"
    if after.randomness != before.randomness:
        return "it seeds or draws random numbers while it is imported"
    return None


@contextmanager
def _captured_output() -> Iterator[Callable[[], bytes]]:
    """Gives a function that returns what was printed, by Python or by libraries in C."""
    sink = os.memfd_create("printed")
    kept = [os.dup(1), os.dup(2)]
    contents = b""

    def printed() -> bytes:
        return contents

    sys.stdout.flush()
    sys.stderr.flush()
    os.dup2(sink, 1)
    os.dup2(sink, 2)
    try:
        yield printed
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        contents = os.pread(sink, os.fstat(sink).st_size, 0)
        for number, descriptor in enumerate(kept, start=1):
            os.dup2(descriptor, number)
            os.close(descriptor)
        os.close(sink)


@contextmanager
def _recorded_environ(reads: dict[str, str | None]) -> Iterator[None]:
    """Note each variable that is looked at. torch's looks do not count: it looks again when it starts CUDA."""
    plain = type(os.environ)

    class Recording(plain):  # type: ignore[misc, valid-type]  # the class of os.environ has no public name
        def __getitem__(self, key: str) -> str:
            value: str | None = None
            try:
                value = super().__getitem__(key)
            finally:
                if not _asked_by_torch():
                    reads.setdefault(key, value)
            return value

    os.environ.__class__ = Recording
    try:
        yield
    finally:
        os.environ.__class__ = plain


def _asked_by_torch() -> bool:
    frame: types.FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_globals.get("__name__") in ("os", "_collections_abc"):
        frame = frame.f_back
    return frame is not None and str(frame.f_globals.get("__name__")).partition(".")[0] == "torch"


def _end_with_parent(number: int) -> None:
    """Ask the kernel for this signal when the parent ends, so that an import that hangs is not left behind."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)
