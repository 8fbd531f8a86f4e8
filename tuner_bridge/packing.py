"""A sweep's working folder as one file, for replicas on machines that do not have it.

The same content gives the same bytes, so that it is sent once. Left out are version control, environments, caches, and
what ``.elastuneignore`` names, in the notation of ``.gitignore``.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import os
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pathspec

from tuner_bridge.errors import InvalidSweep

IGNORE_FILE = ".elastuneignore"
ALWAYS_IGNORED = (
    ".git/",
    ".hg/",
    ".svn/",
    ".venv/",
    "venv/",
    "__pycache__/",
    "*.pyc",
    "*.egg-info/",
    ".mypy_cache/",
    ".pytest_cache/",
    ".ruff_cache/",
    ".ipynb_checkpoints/",
    "node_modules/",
    "*.db",
    "*.db-journal",
    "*.db-wal",
    "*.db-shm",
)
LARGEST_BYTES = 128 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class Package:
    digest: str
    content: bytes


def pack(folder: Path) -> Package:
    """Raises InvalidSweep for a folder that is too large, or cannot be read."""
    raw = io.BytesIO()
    sizes: list[tuple[int, str]] = []
    total = 0
    with tarfile.open(fileobj=raw, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for path in _files(folder):
            name = path.relative_to(folder).as_posix()
            try:
                size = path.stat().st_size
                sizes.append((size, name))
                total += size
                content = path.read_bytes() if total <= LARGEST_BYTES else b""
                executable = os.access(path, os.X_OK)
            except OSError as error:
                raise InvalidSweep(
                    f"the working folder cannot be packed: {error}; name it in {IGNORE_FILE} if replicas need it not"
                ) from error
            if total > LARGEST_BYTES:
                largest = ", ".join(f"{name} ({size / 2**20:.0f} MiB)" for size, name in sorted(sizes)[:-4:-1])
                raise InvalidSweep(
                    f"the working folder {folder} has more than {LARGEST_BYTES // 2**20} MiB to send to the cluster; "
                    f"the largest so far: {largest}. Name data in {IGNORE_FILE}, or put code and data into an image or "
                    "on a volume and say where with ELASTUNE_CODE"
                )
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            entry.mode = 0o755 if executable else 0o644
            archive.addfile(entry, io.BytesIO(content))
    content = gzip.compress(raw.getvalue(), compresslevel=6, mtime=0)
    return Package(hashlib.sha256(content).hexdigest(), content)


def _files(folder: Path) -> Iterator[Path]:
    """Regular files, in order of name; links are packed as what they lead to, but for those that lead back up."""
    lines = list(ALWAYS_IGNORED)
    own = folder / IGNORE_FILE
    if own.is_file():
        lines += own.read_text().splitlines()
    ignored = pathspec.PathSpec.from_lines("gitignore", lines)
    for parent, folders, names in os.walk(folder, followlinks=True):
        below = Path(parent)
        here = below.resolve()
        kept = []
        for name in sorted(folders):
            path = (below / name).relative_to(folder).as_posix()
            # An environment says so itself, whatever it is called.
            left_out = ignored.match_file(f"{path}/") or (below / name / "pyvenv.cfg").exists()
            if not left_out and not here.is_relative_to((below / name).resolve()):
                kept.append(name)
        folders[:] = kept
        for name in sorted(names):
            found = below / name
            if found.is_file() and not ignored.match_file(found.relative_to(folder).as_posix()):
                yield found
