"""Checkpoints that the processes of a replica have written together, each the part of the state that it holds.

The first one's lie in the trial's folder, as where it is alone; the others' in folders beside. A checkpoint counts once
all of its parts are there. Parts of tensors say which of their rows they are, so that any number of processes can go on
from them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from dist_core.errors import InvalidCheckpoint
from dist_core.state.checkpoint import checkpoints_of, read_manifest, verify

logger = logging.getLogger(__name__)

PARTS = "parts"
"""Under this name stands what each process has written of a state that is divided among them."""
DIVIDED = "divided"
"""Name by which a state says that it is divided."""


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """This process's part of a tensor that may be sharded."""
    local: torch.Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor.detach()
    return local


def part_folder(folder: Path, member: int) -> Path:
    return folder if member == 0 else folder / f"part-{member}"


@dataclass(frozen=True, slots=True)
class Readers:
    """Processes that look for a checkpoint together: they verify some of its parts each, and take the same one."""

    member: int = 0
    members: int = 1
    sum: Callable[[Sequence[float]], Sequence[float]] = tuple
    """Collective: over all of them."""
    first_says: Callable[[Any], Any] = lambda value: value
    """Collective: what the first one has, a JSON value, for all."""


ALONE = Readers()


def newest_in_parts(folder: Path, readers: Readers = ALONE) -> tuple[list[Path], dict[str, Any]] | None:
    """Paths of the parts of the newest checkpoint of which all verify, and its manifest; others are warned of."""
    for name in readers.first_says([path.name for path in checkpoints_of(folder)]):
        path, found = folder / name, None
        try:
            found = _verified(path, readers)
        except InvalidCheckpoint as error:
            logger.warning("checkpoint skipped path=%s reason=%s", path, error)
        [damaged] = readers.sum([float(found is None)])
        if found is not None and not damaged:
            return found
    return None


def _verified(path: Path, readers: Readers) -> tuple[list[Path], dict[str, Any]]:
    """Its parts, of which this process has verified its share. Raises InvalidCheckpoint."""
    manifest = read_manifest(path)
    summary = manifest["summary"]
    others = [_beside(part_folder(path.parent, member), summary) for member in range(1, summary.get(PARTS, 1))]
    parts = [(path, manifest), *others]
    for part, of_part in parts[readers.member :: readers.members]:
        verify(part, of_part)
    return [part for part, _ in parts], manifest


def _beside(folder: Path, summary: dict[str, Any]) -> tuple[Path, dict[str, Any]]:
    """The part in this folder that was written at the same step, and its manifest."""
    for path in checkpoints_of(folder):
        try:
            manifest = read_manifest(path)
        except InvalidCheckpoint as error:
            logger.warning("part of a checkpoint skipped path=%s reason=%s", path, error)
            continue
        if manifest["summary"] == summary:
            return path, manifest
    raise InvalidCheckpoint(f"its part in {folder} is missing")


def merged(parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The states of all processes as one: of states that are divided all parts, of others the first one's."""
    first = parts[0]
    return {
        name: {PARTS: [part[name] for part in parts]} if isinstance(state, dict) and state.get(DIVIDED) else state
        for name, state in first.items()
    }
