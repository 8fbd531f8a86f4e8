"""Packages that sweeps have sent for their replicas, by SHA-256 digest: working folders, pickled code and data.

A scheduler keeps the bytes and hands them out; it opens none of them.
"""

from __future__ import annotations

import hashlib
import os
import re
import secrets
import time
from pathlib import Path

LARGEST_BYTES = 16 * 1024**3
KEPT_SECONDS = 14 * 24 * 3600.0
_DIGEST = re.compile(r"^[0-9a-f]{64}$")


class PackageRefused(ValueError):
    """Package that was refused; the message says why."""


class Packages:
    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def find(self, digest: str) -> Path | None:
        """Return the file, or None where it is not here. A package in use stays fresh."""
        if not _DIGEST.match(digest):
            return None
        path = self._folder / digest
        try:
            os.utime(path)
        except OSError:
            return None
        return path

    def begin(self, digest: str) -> Arriving:
        """Take a package up; raises PackageRefused for what is no digest, OSError where the disk does not take it."""
        if not _DIGEST.match(digest):
            raise PackageRefused(f"{digest!r:.80} is not a SHA-256 digest")
        self._folder.mkdir(parents=True, exist_ok=True)
        self._remove_old()
        return Arriving(self._folder, digest)

    def _remove_old(self) -> None:
        for path in self._folder.iterdir():
            if time.time() - path.stat().st_mtime > KEPT_SECONDS:
                path.unlink(missing_ok=True)


class Arriving:
    """A package whose parts come one after the other."""

    def __init__(self, folder: Path, digest: str) -> None:
        self._name = digest
        self._partial = folder / f"{digest}.{secrets.token_hex(4)}.part"
        self._file = open(self._partial, "wb")  # until `close`
        self._digest = hashlib.sha256()

    def add(self, part: bytes) -> None:
        self._digest.update(part)
        self._file.write(part)

    def keep(self) -> None:
        """Keep the package on disk; raise PackageRefused if its content has another digest."""
        found = self._digest.hexdigest()
        if found != self._name:
            raise PackageRefused(f"the package's digest is {found}, not {self._name}; send it again")
        self._file.flush()
        os.fsync(self._file.fileno())
        os.replace(self._partial, self._partial.with_name(self._name))

    def close(self) -> None:
        """Remove what was received and not kept."""
        self._file.close()
        self._partial.unlink(missing_ok=True)
