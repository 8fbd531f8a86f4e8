"""Watches code while it is imported: what it prints, which files it looks at, what it draws by chance."""

from __future__ import annotations

import os
import random
import sys
import sysconfig
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_INSTALLED = tuple({os.path.realpath(sysconfig.get_path(kind)) for kind in ("purelib", "platlib")})
_STANDARD = tuple(
    path + os.sep for path in {os.path.realpath(sysconfig.get_path(kind)) for kind in ("stdlib", "platstdlib")}
)


@contextmanager
def captured_output() -> Iterator[Callable[[], bytes]]:
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
def noticed_entropy(drawn: list[str]) -> Iterator[None]:
    """Notice what a user's own code draws from the operating system: each replica would have drawn another value."""
    plain = os.urandom

    def noticed(size: int) -> bytes:
        if is_the_users(_asking_file()):
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
def noted_files(files: set[str], drawn: list[str]) -> Iterator[None]:
    """Note files of data that are opened, and temporary ones that are made for this process alone."""
    watching = True

    def hook(event: str, arguments: tuple[object, ...]) -> None:
        # A hook stays for good; after the import it looks away.
        if not watching:
            return
        if event == "open" and isinstance(arguments[0], str) and os.path.isfile(arguments[0]):
            path = os.path.realpath(arguments[0])
            if is_the_users(path) and not path.endswith((".py", ".pyc")) and not path.startswith(("/proc/", "/dev/")):
                files.add(path)
        elif event in ("tempfile.mkdtemp", "tempfile.mkstemp") and is_the_users(_asking_file()):
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


def is_the_users(path: str) -> bool:
    """Whether a file belongs neither to Python nor to an installed package."""
    return os.path.isabs(path) and not path.startswith((*_STANDARD, *_INSTALLED))
