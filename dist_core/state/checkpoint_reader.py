"""A trial's checkpoint for torch.distributed.checkpoint: its weights go into a model of any shape."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from dist_core.errors import InvalidCheckpoint
from dist_core.state.checkpoint import load_checkpoint
from dist_core.state.manifests import PARTS
from dist_core.state.parts import merged, newest_in_parts

Chunks = dict[tuple[int, ...], torch.Tensor]
"""Parts of a tensor, by where in it they begin."""


class CheckpointReader(StorageReader):
    """Read the newest intact checkpoint of a trial through ``torch.distributed.checkpoint``.

    ::

        weights = model.state_dict()
        torch.distributed.checkpoint.load(weights, storage_reader=CheckpointReader(folder))
        model.load_state_dict(weights)

    It does not matter how many processes have written the checkpoint, nor over how many, if any, the tensors in
    ``weights`` are sharded.

    Args:
        folder: The trial's folder of checkpoints.
        model: Name that the wrapped model was given; may be left out where the trial has one model.

    Raises:
        InvalidCheckpoint: There is no intact checkpoint, or it has nothing of that model.
    """

    def __init__(self, folder: str | os.PathLike[str], model: str | None = None) -> None:
        self._model = model
        self._chunks: dict[str, Chunks] = {}
        self._sizes: dict[str, torch.Size] = {}
        self.reset(folder)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        if checkpoint_id is not None:
            self._folder = Path(checkpoint_id)
        self._chunks.clear()
        self._sizes.clear()

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return Path(checkpoint_id).is_dir()

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        newest = newest_in_parts(self._folder)
        if newest is None:
            raise InvalidCheckpoint(
                f"{self._folder} contains no valid checkpoint; give the folder of a trial that has written one: "
                "checkpoints/<trial> in the scheduler's state folder, as long as the trial has not ended"
            )
        states = merged([load_checkpoint(path, in_place=True) for path in newest[0]])
        models = [name for name, state in states.items() if _weights_in(state)]
        chosen = models[0] if self._model is None and len(models) == 1 else self._model
        if chosen not in models:
            raise InvalidCheckpoint(
                f"model is {self._model!r} but the checkpoint in {self._folder} has {', '.join(models) or 'none'}; "
                "choose a model that it has"
            )
        for part in _weights_in(states[chosen]):
            for name, value in part.items():
                self._take(name, value)
        return Metadata({name: self._metadata(name) for name in self._chunks})

    def _take(self, name: str, value: Any) -> None:
        """Record a tensor, or a group of its rows, as a chunk of the checkpoint."""
        if isinstance(value, dict):
            rows, of = value["rows"], value["of"]
            at = (value["at"], *[0] * (len(of) - 1)) if of else ()
        elif isinstance(value, torch.Tensor):
            rows, of, at = value, value.shape, (0,) * value.dim()
        else:
            return
        self._sizes[name] = torch.Size(of)
        if rows.numel() or not any(at):
            self._chunks.setdefault(name, {}).setdefault(at, rows)

    def _metadata(self, name: str) -> TensorStorageMetadata:
        chunks = self._chunks[name]
        one = next(iter(chunks.values()))
        return TensorStorageMetadata(
            TensorProperties(dtype=one.dtype),
            self._sizes[name],
            [ChunkStorageMetadata(torch.Size(at), rows.shape) for at, rows in chunks.items()],
        )

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        if not self._chunks:
            # Only the first process has been asked for the metadata.
            self.read_metadata()

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        for item in plan.items:
            rows = self._chunk(item.storage_index)
            for dimension, (start, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
                rows = rows.narrow(dimension, start, length)
            target = planner.resolve_tensor(item).detach()
            target.copy_(rows)
            planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _chunk(self, index: MetadataIndex) -> torch.Tensor:
        chunks = self._chunks[index.fqn]
        return chunks[(0,) * len(self._sizes[index.fqn]) if index.offset is None else tuple(index.offset)]


def _weights_in(state: Any) -> list[dict[str, Any]]:
    """Return a wrapped model's weights by name from each of its writers; empty where the state is another."""
    if not isinstance(state, dict):
        return []
    parts = state.get(PARTS, [state])
    kinds = "weights", "module"
    return [part[kind] for part in parts for kind in kinds if isinstance(part, dict) and kind in part]
