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
import random
import re
import signal
import sys
import sysconfig
import threading
import time
import traceback
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy

from trials.launch.user_code import load

_PR_SET_PDEATHSIG = 1
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD, signal.SIGUSR1, signal.SIGUSR2)
_GPU_COUNTED = re.compile(r"/dev/nvidia(ctl|\d+)")
_GPU_IN_USE = "/dev/nvidia-uvm"
"""Opened by a process that starts CUDA, and not by one that only counts the GPUs."""


_INSTALLED = tuple({os.path.realpath(sysconfig.get_path(kind)) for kind in ("purelib", "platlib")})
_STANDARD = tuple(
    path + os.sep for path in {os.path.realpath(sysconfig.get_path(kind)) for kind in ("stdlib", "platstdlib")}
)


class UnfitToShare(Exception):
    """The import did something that forked replicas cannot have in common."""


@dataclass(slots=True)
class SharedImport:
    printed: bytes = b""
    files_read: set[str] = field(default_factory=set)
    environ_reads: dict[str, str | None] = field(default_factory=dict)
    """Variables that the code looked at, with what it saw."""

    def stranger_to(self, environ: Mapping[str, str]) -> str | None:
        """A variable that the code read and that has another value in a replica with this environment."""
        return next((name for name, seen in self.environ_reads.items() if environ.get(name) != seen), None)


def import_for_sharing(
    user_code: Sequence[str],
    python_path: Sequence[str],
    working_dir: str,
    environ: Mapping[str, str],
    entrypoint: str,
) -> SharedImport:
    """Become a process that has this code in memory; raises UnfitToShare."""
    _end_with_parent(signal.SIGKILL)
    os.environ.clear()
    os.environ.update(environ)
    # Without it, a mere look for GPUs starts CUDA, and no process forked afterwards could.
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    sys.argv = [entrypoint]
    shared = SharedImport()
    began = time.time_ns()
    drawn: list[str] = []
    try:
        os.chdir(working_dir)
        sys.path[:0] = [path for path in python_path if path not in sys.path]
        before = _traces()
        with (
            _captured_output() as printed,
            _noticed_entropy(drawn),
            _noted_files(shared.files_read, drawn),
            _recorded_environ(shared.environ_reads),
        ):
            for name in user_code:
                load(name)
        after = _traces()
        shared.printed = printed()
    except BaseException:
        # Each replica fails on it by itself, and tells its trial.
        raise UnfitToShare(f"it could not be imported: {traceback.format_exc(limit=-1).strip()}") from None
    reason = _why_unfit(before, after) or next(iter(drawn), None)
    if reason is None and any(_changed_since(path, began) for path in (*shared.files_read, *_own_sources())):
        reason = "its files changed while it was imported"
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
    shared_memory: frozenset[str]
    process: tuple[object, ...]
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
    maps = Path("/proc/self/maps").read_text().splitlines()
    shared_memory = frozenset(line.split()[0] for line in maps if line.split()[1] == "rw-s")
    torch = sys.modules.get("torch")
    process = (
        dict(os.environ),
        os.getcwd(),
        [signal.getsignal(number) for number in _SIGNALS],
        None if torch is None else torch.get_num_threads(),
    )
    return _Traces(frozenset(open_now), threads, children, shared_memory, process, randomness)


def _why_unfit(before: _Traces, after: _Traces) -> str | None:
    opened = sorted(path for _, path in after.descriptors - before.descriptors)
    # Counting GPUs leaves these open, and harms nobody.
    opened = [path for path in opened if not _GPU_COUNTED.fullmatch(path)]
    if any(path.startswith(_GPU_IN_USE) for path in opened):
        return "it starts CUDA while it is imported"
    if opened:
        return f"it opens {opened[0]} while it is imported and keeps it open"
    if after.threads > 1:
        return f"it starts threads while it is imported ({after.threads - 1})"
    if after.children != before.children:
        return "it starts processes while it is imported"
    if after.shared_memory - before.shared_memory:
        return "it makes memory or locks that several processes share while it is imported"
    if after.process != before.process:
        return "it changes variables, the folder, signals or torch's threads of its process while it is imported"
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


@contextmanager
def _noticed_entropy(drawn: list[str]) -> Iterator[None]:
    """Notice what a user's own code draws from the operating system: each replica would have drawn another value."""
    plain = os.urandom

    def noticed(size: int) -> bytes:
        if _is_the_users(_asking_file()):
            drawn.append("it seeds or draws random numbers while it is imported")
        return plain(size)

    places = [(os, "urandom"), *((module, "_urandom") for module in (random, sys.modules.get("uuid")) if module)]
    places = [(module, name) for module, name in places if getattr(module, name, None) is plain]
    for module, name in places:
        setattr(module, name, noticed)
    try:
        yield
    finally:
        for module, name in places:
            setattr(module, name, plain)


@contextmanager
def _noted_files(files: set[str], drawn: list[str]) -> Iterator[None]:
    """Note files of data that are opened, and temporary ones that are made for this process alone."""
    watching = True

    def hook(event: str, arguments: tuple[object, ...]) -> None:
        # A hook stays for good; after the import it looks away.
        if not watching:
            return
        if event == "open" and isinstance(arguments[0], str) and os.path.isfile(arguments[0]):
            path = os.path.realpath(arguments[0])
            if _is_the_users(path) and not path.endswith((".py", ".pyc")) and not path.startswith(("/proc/", "/dev/")):
                files.add(path)
        elif event in ("tempfile.mkdtemp", "tempfile.mkstemp") and _is_the_users(_asking_file()):
            drawn.append("it makes a temporary file or folder of its own while it is imported")

    sys.addaudithook(hook)
    try:
        yield
    finally:
        watching = False


def _asking_file() -> str:
    """File of the nearest code that is not the standard library's."""
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None:
        path = frame.f_code.co_filename
        if os.path.isabs(path) and path != __file__ and (path.startswith(_INSTALLED) or not path.startswith(_STANDARD)):
            return path
        frame = frame.f_back
    return ""


def _is_the_users(path: str) -> bool:
    return os.path.isabs(path) and not path.startswith((*_STANDARD, *_INSTALLED))


def _own_sources() -> list[str]:
    files = (getattr(module, "__file__", None) for module in list(sys.modules.values()))
    return [path for path in files if isinstance(path, str) and _is_the_users(path)]


def _changed_since(path: str, then: int) -> bool:
    try:
        return os.stat(path).st_mtime_ns > then
    except OSError:
        return True


def _asked_by_torch() -> bool:
    frame: types.FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_globals.get("__name__") in ("os", "_collections_abc"):
        frame = frame.f_back
    return frame is not None and str(frame.f_globals.get("__name__")).partition(".")[0] == "torch"


def _end_with_parent(number: int) -> None:
    """Ask the kernel for this signal when the parent ends, so that an import that hangs is not left behind."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)
