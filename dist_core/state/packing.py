"""Takes the tensors out of nested values and puts them back; what is left is plain and can be read safely."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from dist_core.errors import InvalidTraining

_SLOT = "__tensor__"


def pack(value: Any, tensors: list[torch.Tensor], path: tuple[object, ...] = ()) -> Any:
    """Return a copy of the value with each tensor replaced by a numbered slot; the tensors are appended in order.

    NumPy arrays become tensors and NumPy scalars Python numbers: a reader with ``weights_only`` takes nothing else.
    Raises InvalidTraining, with the ``path`` to it, for a value that such a reader would refuse.
    """
    if type(value) in _PLAIN:
        return value
    if isinstance(value, torch.Tensor):
        tensors.append(value.detach())
        return {_SLOT: len(tensors) - 1}
    if isinstance(value, np.ndarray):
        tensors.append(torch.from_numpy(value))
        return {_SLOT: len(tensors) - 1}
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, dict):
        return {_restorable(key, (*path, key)): pack(item, tensors, (*path, key)) for key, item in value.items()}
    if isinstance(value, list):
        return [pack(item, tensors, (*path, index)) for index, item in enumerate(value)]
    if isinstance(value, tuple) and not isinstance(value, torch.Size):
        return tuple(pack(item, tensors, (*path, index)) for index, item in enumerate(value))
    return copy.deepcopy(_restorable(value, path))


_PLAIN = (type(None), bool, int, float, str)
"""Plain types: by far the most values, and beyond doubt."""


def _restorable(value: Any, path: tuple[object, ...]) -> Any:
    """Return the value, if what is written of it can be read with ``weights_only``."""
    if type(value) in _PLAIN:
        return value
    buffer = io.BytesIO()
    try:
        torch.save(value, buffer)
        torch.load(io.BytesIO(buffer.getvalue()), weights_only=True)
    except Exception as error:
        where = f"{path[0]}" + "".join(f"[{key!r}]" for key in path[1:]) if path else "the state"
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise InvalidTraining(
            f"the state {where} holds a {type(value).__module__}.{type(value).__qualname__}, which a checkpoint "
            "cannot restore: it only holds tensors, arrays, numbers, strings, and lists, tuples and dicts of them "
            f"({reason}). Convert it in state_dict(), and convert it back in load_state_dict()"
        ) from error
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


def pack_copy(
    value: Any, stays: Callable[[torch.Tensor], bool] = lambda tensor: False
) -> tuple[Any, list[torch.Tensor]]:
    """Pack a value that goes on changing: copy its tensors to host memory, except those for which ``stays`` is true.

    This may be where the device's memory has run out.
    """
    tensors: list[torch.Tensor] = []
    skeleton = pack(value, tensors)
    return skeleton, [tensor if stays(tensor) else tensor.to("cpu", copy=True) for tensor in tensors]


def tensor_slots(skeleton: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], int]]:
    """(path, number) of the tensors in a packed value."""
    if isinstance(skeleton, dict):
        if _SLOT in skeleton:
            yield path, skeleton[_SLOT]
            return
        for key, item in skeleton.items():
            yield from tensor_slots(item, (*path, key))
    elif isinstance(skeleton, (list, tuple)):
        for index, item in enumerate(skeleton):
            yield from tensor_slots(item, (*path, index))
