"""Checkpoints that the processes of a replica have written together, each the part of the state that it holds.

Parts of tensors say which of their rows they are, so that any number of processes can go on
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
from dist_core.state.checkpoint import verify
from dist_core.state.manifests import PARTS, Part, checkpoints_of, parts_of

logger = logging.getLogger(__name__)

DIVIDED = "divided"
"""Name by which a state says that it is divided."""


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return this process's part of a tensor that may be sharded."""
    local: torch.Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor.detach()
    return local


@dataclass(frozen=True, slots=True)
class Readers:
    """Processes that look for a checkpoint together: they verify some of its parts each, and take the same one."""

    member: int = 0
    members: int = 1
    sum: Callable[[Sequence[float]], Sequence[float]] = tuple
    """Collective: add up vectors over all readers."""
    first_says: Callable[[Any], Any] = lambda value: value
    """Collective: what the first one has, a JSON value, for all."""


ALONE = Readers()


def newest_in_parts(folder: Path, readers: Readers = ALONE) -> tuple[list[Path], dict[str, Any]] | None:
    """Paths of the parts of the newest checkpoint of which all verify, and its manifest; others are warned of."""
    for name in readers.first_says([path.name for path in checkpoints_of(folder)]):
        path, parts = folder / name, list[Part]()
        try:
            parts = _verified(path, readers)
        except InvalidCheckpoint as error:
            logger.warning("checkpoint skipped path=%s reason=%s", path, error)
        [damaged] = readers.sum([float(not parts)])
        if parts and not damaged:
            return [part for part, _ in parts], parts[0][1]
    return None


def _verified(path: Path, readers: Readers) -> list[Part]:
    """Return its parts, of which this process has verified its share. Raises InvalidCheckpoint."""
    parts = parts_of(path)
    for part, manifest in parts[readers.member :: readers.members]:
        verify(part, manifest)
    return parts


def merged(parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the states of all processes as one: of states that are divided all parts, of others the first one's."""
    first = parts[0]
    return {
        name: {PARTS: [part[name] for part in parts]} if isinstance(state, dict) and state.get(DIVIDED) else state
        for name, state in first.items()
    }
