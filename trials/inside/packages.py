"""Packed working folders, where code and its replicas are on different machines."""

from __future__ import annotations

import os
import tarfile
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from dist_core.link.client import ControlChannel
from dist_core.older_python import sha256_of

OF_INSTALLATION = ("site-packages", "dist-packages", "lib/python")


def python_path(folders: Sequence[str], moved: Callable[[str], str]) -> list[str]:
    """Return the folders of the user's own modules that exist on this machine.

    ``moved``: maps a path to this machine.
    """
    own = [moved(path) for path in folders if not any(part in path for part in OF_INSTALLATION)]
    return [path for path in own if os.path.isdir(path)]


def unpack(channel: ControlChannel, digest: str, folder: Path) -> None:
    """Fetch and unpack a package; raise ControlChannelError, OSError or TarError."""
    with tempfile.TemporaryDirectory() as scratch:
        packed = Path(scratch) / "package"
        channel.download("/package", packed)
        with open(packed, "rb") as file:
            found = sha256_of(file)
        if found != digest:
            raise OSError(f"its digest is {found}, it should be {digest}")
        folder.mkdir(parents=True, exist_ok=True)
        with tarfile.open(packed) as archive:
            for member in archive:
                if not (member.isreg() or member.isdir()) or not _is_within(folder, folder / member.name):
                    raise tarfile.TarError(
                        "a package may only contain files and folders within it, but this one contains "
                        f"{member.name!r:.80}"
                    )
            # Python 3.11.4 and later check it as well; some of those want to be told to.
            checks: dict[str, Any] = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}
            archive.extractall(folder, **checks)  # noqa: S202  # each was looked at


def _is_within(folder: Path, path: Path) -> bool:
    return path.resolve().is_relative_to(folder.resolve())
