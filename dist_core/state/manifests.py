"""Checkpoints as they lie on disk, without what is in them: their names, manifests and parts. Without torch.

A checkpoint is a folder ``checkpoint-<sequence>`` with the state and a manifest. The manifest of one that is flushed to
disk has the state's checksum. Before that it names the boot of the machine that wrote it: while that lasts, the
machine's memory has the state, whatever becomes of the process.

Where the processes of a replica have each written a part of the state, the first one's lie in the trial's folder, as
where it is alone; the others' in folders beside. A checkpoint counts once all of its parts are there.
"""

from __future__ import annotations

import json
import logging
from functools import cache
from pathlib import Path
from typing import Any

from dist_core.errors import InvalidCheckpoint

FORMAT_VERSION = 2
STATE, MANIFEST, PREFIX = "state.pt", "manifest.json", "checkpoint-"
CHECKSUM, BOOT = "sha256", "boot"
PARTS = "parts"
"""Under this name stands how many processes have written a part."""

logger = logging.getLogger(__name__)

Part = tuple[Path, dict[str, Any]]
"""A checkpoint's folder, and its manifest."""


@cache
def present_boot() -> str:
    """Return what tells this run of the machine from others; empty where it cannot be told."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def is_flushed(manifest: dict[str, Any]) -> bool:
    return BOOT not in manifest


def sequences(folder: Path) -> list[tuple[int, Path]]:
    """(sequence, path) of the checkpoint folders, newest first."""
    if not folder.is_dir():
        return []
    numbered = [
        (int(path.name.removeprefix(PREFIX)), path)
        for path in folder.iterdir()
        if path.name.startswith(PREFIX) and path.name.removeprefix(PREFIX).isdigit()
    ]
    return sorted(numbered, reverse=True)


def checkpoints_of(folder: Path) -> list[Path]:
    """Newest first."""
    return [path for _, path in sequences(folder)]


def part_folder(folder: Path, member: int) -> Path:
    return folder if member == 0 else folder / f"part-{member}"


def read_manifest(path: Path, *, flushed: bool = False) -> dict[str, Any]:
    """Read a checkpoint folder's manifest without looking at its state. Raises InvalidCheckpoint.

    ``flushed``: refuse one that is not on disk yet.
    """
    try:
        manifest: dict[str, Any] = json.loads((path / MANIFEST).read_text())
    except (OSError, ValueError) as error:
        raise InvalidCheckpoint(f"checkpoint {path} cannot be read: {error}") from error
    if manifest.get("format") != FORMAT_VERSION:
        raise InvalidCheckpoint(
            f"checkpoint {path} has format {manifest.get('format')}; this version reads {FORMAT_VERSION}"
        )
    if not is_flushed(manifest) and (flushed or not manifest[BOOT] or manifest[BOOT] != present_boot()):
        raise InvalidCheckpoint(f"checkpoint {path} was not on disk yet when it was last written to")
    return manifest


def parts_of(path: Path, *, flushed: bool = False) -> list[Part]:
    """Return a checkpoint with the parts that belong to it, the first process's first. Raises InvalidCheckpoint."""
    manifest = read_manifest(path, flushed=flushed)
    summary = manifest["summary"]
    others = range(1, summary.get(PARTS, 1))
    return [(path, manifest), *(_beside(part_folder(path.parent, each), summary, flushed=flushed) for each in others)]


def _beside(folder: Path, summary: dict[str, Any], *, flushed: bool) -> Part:
    """Return the part in this folder that was written at the same step."""
    for path in checkpoints_of(folder):
        try:
            manifest = read_manifest(path, flushed=flushed)
        except InvalidCheckpoint as error:
            logger.debug("part of a checkpoint passed over path=%s reason=%s", path, error)
            continue
        if manifest["summary"] == summary:
            return path, manifest
    raise InvalidCheckpoint(f"its part in {folder} is missing")


def newest_parts(folder: Path, *, flushed: bool) -> list[Part]:
    """Return the newest checkpoint in a folder with all of its parts; nothing where none has them.

    ``flushed``: only what is on disk, where it may be read on another machine.
    """
    for path in checkpoints_of(folder):
        try:
            return parts_of(path, flushed=flushed)
        except InvalidCheckpoint as error:
            logger.debug("checkpoint passed over path=%s reason=%s", path, error)
    return []
