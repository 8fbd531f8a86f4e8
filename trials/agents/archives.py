"""Checkpoints on their way between a node and a scheduler that share no files: a folder as a tar, and back."""

from __future__ import annotations

import json
import os
import re
import shutil
import tarfile
import uuid
from collections.abc import Iterator
from pathlib import Path

from dist_core.state.manifests import is_flushed

KEPT = 2
"""Checkpoints kept of each writer; a replica of several processes has as many writers."""
CHUNK = 1 << 20
NAME = re.compile(r"^(?:(?:ended|after-\d{1,9})/)?(?:part-\d{1,4}/)?checkpoint-\d{8}$")
"""Pattern of a checkpoint's path, relative to its trial's folder."""
_FILE = re.compile(r"^[A-Za-z0-9_][A-Za-z0-9._-]{0,99}$")
_BLOCK = tarfile.BLOCKSIZE


def newest(folder: Path) -> dict[str, str]:
    """Return the newest of a trial's checkpoints that are on disk, by the writer's folder."""
    newest_by_writer: dict[str, str] = {}
    # Not recursively: a folder that is being written may vanish while it is looked into.
    places = [f"{kept}{part}" for kept in ("", "ended/", "after-*/") for part in ("", "part-*/")]
    for manifest in (path for place in places for path in folder.glob(f"{place}checkpoint-*/manifest.json")):
        name = manifest.parent.relative_to(folder).as_posix()
        if NAME.match(name) and _is_flushed(manifest):
            writer = name.rpartition("/")[0]
            newest_by_writer[writer] = max(name, newest_by_writer.get(writer, ""))
    return newest_by_writer


def _is_flushed(manifest: Path) -> bool:
    try:
        return is_flushed(json.loads(manifest.read_text()))
    except (OSError, ValueError):
        return False


def packed(folder: Path) -> Iterator[bytes]:
    """Yield the folder's files as a tar, a part after the other; raise OSError for what is being removed."""
    for path in sorted(folder.iterdir()):
        with open(path, "rb") as file:
            about = tarfile.TarInfo(path.name)
            about.size = os.fstat(file.fileno()).st_size
            yield about.tobuf()
            left = about.size
            while left:
                part = file.read(min(CHUNK, left))
                if not part:
                    raise OSError(f"{path} became shorter while it was read")
                left -= len(part)
                yield part
            yield b"\0" * (-about.size % _BLOCK)
    yield b"\0" * (2 * _BLOCK)


def unpack(archive: Path, target: Path) -> None:
    """Unpack whole or not at all, and durably; older checkpoints beside it go. Raise OSError, and TarError."""
    target.parent.mkdir(parents=True, exist_ok=True)
    arriving = target.with_name(f"partial-{uuid.uuid4().hex[:12]}")
    arriving.mkdir()
    try:
        with tarfile.open(archive, "r:") as members:
            for member in members:
                if not member.isreg() or not _FILE.match(member.name):
                    raise tarfile.TarError(
                        "a checkpoint may only contain regular files with plain names, but this one contains "
                        f"{member.name!r:.80}"
                    )
                source = members.extractfile(member)
                assert source is not None
                with open(arriving / member.name, "wb") as file:
                    shutil.copyfileobj(source, file, CHUNK)
                    file.flush()
                    os.fsync(file.fileno())
        if not (arriving / "manifest.json").is_file():
            raise tarfile.TarError("the checkpoint has no manifest.json")
        shutil.rmtree(target, ignore_errors=True)
        os.rename(arriving, target)
    except BaseException:
        shutil.rmtree(arriving, ignore_errors=True)
        raise
    for old in sorted(target.parent.glob("checkpoint-*"), reverse=True)[KEPT:]:
        shutil.rmtree(old, ignore_errors=True)
