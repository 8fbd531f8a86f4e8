"""Sends the training state from one replica to the others of a new generation.

Tensors travel as they are, each into memory of its own shape; what is around them (names, numbers, nesting) travels as
a small header. The header is read with ``weights_only``, as everything that comes over a wire.
"""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import torch

from dist_core.replica_group import ReplicaGroup

_SLOT = "__tensor__"


def pack(value: Any, tensors: list[torch.Tensor]) -> Any:
    """The value with each tensor replaced by a numbered slot; the tensors are appended in order.

    NumPy arrays become tensors and NumPy scalars Python numbers: a reader with ``weights_only`` takes nothing else.
    """
    if isinstance(value, torch.Tensor):
        tensors.append(value.detach())
        return {_SLOT: len(tensors) - 1}
    if isinstance(value, np.ndarray):
        tensors.append(torch.from_numpy(value))
        return {_SLOT: len(tensors) - 1}
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, dict):
        return {key: pack(item, tensors) for key, item in value.items()}
    if isinstance(value, list):
        return [pack(item, tensors) for item in value]
    if isinstance(value, tuple):
        return tuple(pack(item, tensors) for item in value)
    return value


def unpack(skeleton: Any, tensors: list[torch.Tensor]) -> Any:
    """Inverse of pack."""
    if isinstance(skeleton, dict):
        if _SLOT in skeleton:
            return tensors[skeleton[_SLOT]]
        return {key: unpack(item, tensors) for key, item in skeleton.items()}
    if isinstance(skeleton, list):
        return [unpack(item, tensors) for item in skeleton]
    if isinstance(skeleton, tuple):
        return tuple(unpack(item, tensors) for item in skeleton)
    return skeleton


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as bytes: not every type of number can be broadcast as what it is."""
    return tensor.flatten().view(torch.uint8) if tensor.numel() else tensor


def hand_over(group: ReplicaGroup, state: dict[str, Any] | None, *, source: int = 0) -> dict[str, Any]:
    """Collective: rank ``source`` gives its ``state``, everybody returns an equal one. Raises PeerLost.

    Returned tensors are on the CPU and belong to the caller, except on ``source``, which gets its own back.
    """
    if group.world_size == 1:
        assert state is not None
        return state
    tensors: list[torch.Tensor] = []
    header = b""
    if group.rank == source:
        assert state is not None
        skeleton = pack(state, tensors)
        tensors = [tensor.cpu().contiguous() for tensor in tensors]
        shapes = [[list(tensor.shape), str(tensor.dtype).removeprefix("torch.")] for tensor in tensors]
        buffer = io.BytesIO()
        torch.save({"skeleton": skeleton, "shapes": shapes}, buffer)
        header = buffer.getvalue()
    header = group.broadcast_bytes(header, source=source)
    if group.rank == source:
        group.broadcast_tensors([_as_bytes(tensor) for tensor in tensors], source=source)
        assert state is not None
        return state
    content = torch.load(io.BytesIO(header), weights_only=True)
    tensors = [torch.empty(shape, dtype=getattr(torch, dtype)) for shape, dtype in content["shapes"]]
    group.broadcast_tensors([_as_bytes(tensor) for tensor in tensors], source=source)
    result: dict[str, Any] = unpack(content["skeleton"], tensors)
    return result
