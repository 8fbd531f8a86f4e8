"""Packed working folders, where code and its replicas are on different machines."""

from __future__ import annotations

import hashlib
import tarfile
import tempfile
from pathlib import Path

from dist_core.link.client import ControlChannel


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
