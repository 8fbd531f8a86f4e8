"""Which code a process has in memory, and whether the disk has another one by now.

Watched are the files of modules outside the standard library and the installed packages, each by its time and size,
and of the folders of installed packages their own times, which every installation changes. A look costs a tenth of a
millisecond.
"""

from __future__ import annotations

import os
import sys
import sysconfig
from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass(slots=True)
class LoadedSources:
    _seen: dict[str, tuple[int, int] | None] = field(default_factory=dict)
    _modules: int = 0

    def note(self) -> None:
        """Take up what has been imported since the last call."""
        if len(sys.modules) == self._modules:
            return
        self._modules = len(sys.modules)
        installed = tuple({os.path.realpath(sysconfig.get_path(kind)) for kind in ("purelib", "platlib")})
        elsewhere = (*installed, *{os.path.realpath(sysconfig.get_path(kind)) for kind in ("stdlib", "platstdlib")})
        found = {os.path.realpath(path) for path in map(_file_of, list(sys.modules.values())) if path is not None}
        for path in (*installed, *(each for each in found if not each.startswith(elsewhere))):
            self._seen.setdefault(path, _stamp(path))

    def watch(self, paths: Iterable[str]) -> None:
        """Other files that matter, such as data that was read."""
        for path in paths:
            self._seen.setdefault(path, _stamp(path))

    def changed(self) -> str | None:
        """A path whose content is not what was loaded, None when all are as they were."""
        return next((path for path, stamp in self._seen.items() if _stamp(path) != stamp), None)


def _file_of(module: object) -> str | None:
    path = getattr(module, "__file__", None)
    return path if isinstance(path, str) and os.path.isabs(path) else None


def _stamp(path: str) -> tuple[int, int] | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_mtime_ns, 0 if os.path.isdir(path) else found.st_size
