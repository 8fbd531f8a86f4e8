"""Packed working folders, where code and its replicas are on different machines."""

from __future__ import annotations

import hashlib
import os
import tarfile
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from dist_core.link.client import ControlChannel

OF_INSTALLATION = ("site-packages", "dist-packages", "lib/python")


def python_path(given: Sequence[str], moved: Callable[[str], str]) -> list[str]:
    """Folders of the user's own modules that are here as well; installed packages are this machine's.

    ``moved``: where a path is found here.
    """
    own = [moved(path) for path in given if not any(part in path for part in OF_INSTALLATION)]
    return [path for path in own if os.path.isdir(path)]


def unpack(channel: ControlChannel, digest: str, folder: Path) -> None:
    """Raises ControlChannelError when the scheduler does not hand it out, OSError or TarError when it is no use."""
    with tempfile.TemporaryDirectory() as scratch:
        packed = Path(scratch) / "package"
        channel.download("/package", packed)
        with open(packed, "rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
        if found != digest:
            raise OSError(f"its digest is {found}, it should be {digest}")
        folder.mkdir(parents=True, exist_ok=True)
        with tarfile.open(packed) as archive:
            archive.extractall(folder, filter="data")
