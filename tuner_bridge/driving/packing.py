"""A sweep's working folder as one file, for replicas on machines that do not have it.

The same content gives the same bytes, so that it is sent once.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import os
import tarfile
from dataclasses import dataclass
from pathlib import Path

from trials.plain_words import one_line
from tuner_bridge.driving.left_out import IGNORE_FILE, Walk, holds_private_key
from tuner_bridge.errors import InvalidSweep

LARGEST_BYTES = 128 * 1024 * 1024
MOST_LISTED = 40


@dataclass(frozen=True, slots=True)
class Package:
    digest: str
    content: bytes
    files: tuple[tuple[str, int], ...]
    """Names and sizes in bytes, in order of name."""
    left_out: tuple[tuple[str, str], ...]
    """Names that somebody might miss, and why."""

    def __str__(self) -> str:
        """Describe what is sent, for people to check."""
        total = sum(size for _, size in self.files)
        lines = [f"{len(self.files)} files with {_size(total)}, packed to {_size(len(self.content))}:"]
        largest = sorted(self.files, key=lambda file: -file[1])[:MOST_LISTED]
        lines += [f"  {_size(size):>9}  {name}" for name, size in sorted(largest)]
        if len(self.files) > MOST_LISTED:
            lines.append(f"  and {len(self.files) - MOST_LISTED} smaller ones")
        lines += [f"  left out   {name}: {why}" for name, why in self.left_out[:MOST_LISTED]]
        if len(self.left_out) > MOST_LISTED:
            lines.append(f"  left out   and {len(self.left_out) - MOST_LISTED} more")
        return "\n".join(map(one_line, lines))


def pack(folder: Path) -> Package:
    """Pack a folder; raise InvalidSweep if it is too large, or cannot be read."""
    raw = io.BytesIO()
    sizes: list[tuple[int, str]] = []
    total = 0
    with tarfile.open(fileobj=raw, mode="w", format=tarfile.PAX_FORMAT) as archive:
        walk = Walk(folder)
        for path in walk:
            name = path.relative_to(folder).as_posix()
            try:
                size = path.stat().st_size
                sizes.append((size, name))
                total += size
                content = path.read_bytes() if total <= LARGEST_BYTES else b""
                executable = os.access(path, os.X_OK)
            except OSError as error:
                raise InvalidSweep(
                    f"the working folder cannot be packed: {error}; name it in {IGNORE_FILE} if replicas do not need it"
                ) from error
            if holds_private_key(content):
                walk.left_out.append((name, "is a private key"))
                total -= sizes.pop()[0]
                continue
            if total > LARGEST_BYTES:
                largest = ", ".join(f"{name} ({size / 2**20:.0f} MiB)" for size, name in sorted(sizes)[:-4:-1])
                raise InvalidSweep(
                    f"the working folder {folder} has more than {LARGEST_BYTES // 2**20} MiB to send to the cluster; "
                    f"the largest so far: {largest}. Name data in {IGNORE_FILE}, or put code and data into an image "
                    "or on a volume and set ELASTUNE_CODE"
                )
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            entry.mode = 0o755 if executable else 0o644
            archive.addfile(entry, io.BytesIO(content))
    content = gzip.compress(raw.getvalue(), compresslevel=6, mtime=0)
    return Package(
        hashlib.sha256(content).hexdigest(),
        content,
        tuple((name, size) for size, name in sizes),
        tuple(walk.left_out),
    )


def _size(amount: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if amount < 1024:
            return f"{amount:.0f} {unit}" if unit == "B" else f"{amount:.1f} {unit}"
        amount /= 1024
    return f"{amount:.1f} GiB"
