"""Notes which variables of the environment code looks at while it is imported.

Libraries that want all variables with a certain beginning go through all there are: what one passes over by its
beginning it has not looked at, else nothing could be shared by replicas of which any variable differs.
"""

from __future__ import annotations

import os
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager


class _Passing(str):
    """The name of a variable that a loop over all has come to."""

    __slots__ = ("loop",)
    loop: _Loop

    def startswith(self, *arguments: object) -> bool:
        found = super().startswith(*arguments)  # type: ignore[arg-type]  # whatever str's own takes
        if not found:
            self.loop.pass_over(self)
        return found

    def __reduce__(self) -> tuple[type[str], tuple[str]]:
        return str, (str(self),)


class _Loop:
    """One over all variables: what it is at is not read if it passes that over; what it has left behind stays read."""

    def __init__(self, reads: dict[str, str | None]) -> None:
        self.reads = reads
        self.at: _Passing | None = None
        """Unless that had been read before."""

    def come_to(self, name: str) -> _Passing:
        found = _Passing(name)
        found.loop = self
        self.at = None if name in self.reads else found
        return found

    def pass_over(self, name: _Passing) -> None:
        if name is self.at:
            self.reads.pop(name, None)


@contextmanager
def recorded_environ(reads: dict[str, str | None]) -> Iterator[None]:
    """Note each variable that is looked at. torch's looks do not count: it looks again when it starts CUDA."""
    plain = type(os.environ)

    class Recording(plain):  # type: ignore[misc, valid-type]  # the class of os.environ has no public name
        def __getitem__(self, key: str) -> str:
            value: str | None = None
            try:
                value = super().__getitem__(key)
            finally:
                if not _asked_by_torch():
                    reads.setdefault(str(key), value)
            return value

        def __iter__(self) -> Iterator[str]:
            loop = _Loop(reads)
            for name in super().__iter__():
                yield loop.come_to(name)
            loop.at = None

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
