"""Packed working folders that sweeps have sent, for replicas on other machines: files named by their digest."""

from __future__ import annotations

import hashlib
import os
import re
import secrets
import time
from pathlib import Path

LARGEST_BYTES = 256 * 1024 * 1024
KEPT_SECONDS = 14 * 24 * 3600.0
_DIGEST = re.compile(r"^[0-9a-f]{64}$")


class PackageRefused(ValueError):
    """What was sent is not what it should be; the message says why."""


class Packages:
    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def find(self, digest: str) -> Path | None:
        """The file; None when it is not here. A package in use stays fresh."""
        if not _DIGEST.match(digest):
            return None
        path = self._folder / f"{digest}.tar.gz"
        try:
            os.utime(path)
        except OSError:
            return None
        return path

    def put(self, digest: str, content: bytes) -> None:
        """Durable when it returns; raises PackageRefused, or OSError when the disk does not take it."""
        if not _DIGEST.match(digest):
            raise PackageRefused(f"{digest!r:.80} is no SHA-256 digest")
        if len(content) > LARGEST_BYTES:
            raise PackageRefused(f"the package has {len(content)} bytes; it may have {LARGEST_BYTES}")
        found = hashlib.sha256(content).hexdigest()
        if found != digest:
            raise PackageRefused(f"the package's digest is {found}, not {digest}; send it again")
        self._folder.mkdir(parents=True, exist_ok=True)
        partial = self._folder / f"{digest}.{secrets.token_hex(4)}.part"
        try:
            with open(partial, "wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            os.replace(partial, self._folder / f"{digest}.tar.gz")
        finally:
            partial.unlink(missing_ok=True)
        self._remove_old()

    def _remove_old(self) -> None:
        for path in self._folder.iterdir():
            if time.time() - path.stat().st_mtime > KEPT_SECONDS:
                path.unlink(missing_ok=True)
