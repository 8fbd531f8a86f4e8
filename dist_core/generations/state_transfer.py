"""Sends the training state from survivors to the other replicas of a new generation.

Tensors travel as they are, where possible straight into memory that the receiver has already; what is around them
(names, numbers, nesting) travels as a small header. The header is read with ``weights_only``, as everything that comes
over a wire.

Weights and optimizer states are the same on all survivors and make up nearly all of the bytes. So each joiner gets
them from a survivor of its own, while the rest (buffers, random states, what the user registered) comes from rank 0
for everybody.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from typing import Any

import torch

from dist_core.device import device_of
from dist_core.errors import InvalidTraining
from dist_core.generations.process_groups import ReplicaGroup
from dist_core.state.copies import in_host_memory
from dist_core.state.packing import pack, tensor_slots, unpack


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """View a tensor's memory as bytes: not every type of number can be broadcast as what it is."""
    return tensor.flatten().view(torch.uint8) if tensor.numel() else tensor


def _header(skeleton: Any, tensors: Sequence[torch.Tensor], **more: Any) -> bytes:
    """Encode all that a receiver has to know before the tensors come."""
    shapes = [[list(tensor.shape), str(tensor.dtype).removeprefix("torch.")] for tensor in tensors]
    buffer = io.BytesIO()
    torch.save({"skeleton": skeleton, "shapes": shapes, **more}, buffer)
    return buffer.getvalue()


def _memory_for(shape: list[int], dtype: str) -> torch.Tensor:
    return torch.empty(shape, dtype=getattr(torch, dtype))


def hand_over(group: ReplicaGroup, state: dict[str, Any] | None, *, source: int = 0) -> dict[str, Any]:
    """Give rank ``source``'s ``state`` to everybody; all return an equal one. Collective.

    Raises PeerLost. Returned tensors are on the CPU and belong to the caller, except on ``source``, which gets its own
    back.
    """
    if group.world_size == 1:
        assert state is not None
        return state
    tensors: list[torch.Tensor] = []
    header = b""
    if group.rank == source:
        assert state is not None
        skeleton = pack(state, tensors)
        tensors = in_host_memory(tensors)
        header = _header(skeleton, tensors)
    header = group.broadcast_bytes(header, source=source)
    if group.rank == source:
        group.broadcast_tensors([_as_bytes(tensor) for tensor in tensors], source=source)
        assert state is not None
        return state
    content = torch.load(io.BytesIO(header), weights_only=True)
    tensors = [_memory_for(shape, dtype) for shape, dtype in content["shapes"]]
    group.broadcast_tensors([_as_bytes(tensor) for tensor in tensors], source=source)
    result: dict[str, Any] = unpack(content["skeleton"], tensors)
    return result


def broadcast_in_place(group: ReplicaGroup, tensors: Sequence[torch.Tensor]) -> None:
    """Overwrite the tensors of every rank with rank 0's, on any device; collective. Raises PeerLost."""
    in_host = in_host_memory(tensors)
    group.broadcast_tensors(in_host)
    if group.rank != 0:
        for tensor, received in zip(tensors, in_host, strict=True):
            if received is not tensor:
                device_of(tensor).copy(tensor, received)


def share_state(
    group: ReplicaGroup,
    own: dict[str, Any],
    *,
    joiners: Sequence[int] = (),
    is_replicated: Callable[[torch.Tensor], bool],
) -> dict[str, Any]:
    """Return rank 0's state on all replicas; collective.

    ``own`` is what this replica has; a joiner's is received into. Rank 0 says who the ``joiners`` are; others need not
    know. Tensors that ``is_replicated`` names are the same on all survivors: they are sent to joiners only, each by
    another survivor, and stay as they are elsewhere. Raises PeerLost.
    """
    tensors: list[torch.Tensor] = []
    skeleton = pack(own, tensors)
    header = b""
    if group.rank == 0:
        replicated = [is_replicated(tensor) for tensor in tensors]
        header = _header(skeleton, tensors, replicated=replicated, joiners=list(joiners))
    content = torch.load(io.BytesIO(group.broadcast_bytes(header)), weights_only=True)
    joiners = content["joiners"]
    present = tensors
    if group.rank != 0:
        by_path = {path: tensors[slot] for path, slot in tensor_slots(skeleton)}
        own_tensors = [
            by_path.get(path) for path, _ in sorted(tensor_slots(content["skeleton"]), key=lambda pair: pair[1])
        ]
        survives = group.rank not in joiners
        present = [
            _usable(tensor, shape, dtype, keep=survives and replicated)
            for tensor, (shape, dtype), replicated in zip(
                own_tensors, content["shapes"], content["replicated"], strict=True
            )
        ]
        if survives:
            _refuse_what_nobody_sends(content, own_tensors, present)
    chosen = list(zip(present, content["replicated"], strict=True))
    group.broadcast_tensors([_as_bytes(tensor) for tensor, replicated in chosen if not replicated])
    _pass_on(group, [tensor for tensor, replicated in chosen if replicated], joiners)
    if group.rank == 0:
        return own
    result: dict[str, Any] = unpack(content["skeleton"], present)
    return result


def _usable(tensor: torch.Tensor | None, shape: list[int], dtype: str, *, keep: bool) -> torch.Tensor:
    """Return the replica's own tensor if it can be kept or received into, else memory for one."""
    fits = tensor is not None and list(tensor.shape) == shape and str(tensor.dtype) == f"torch.{dtype}"
    if tensor is not None and fits and (keep or (tensor.device.type == "cpu" and tensor.is_contiguous())):
        return tensor
    return _memory_for(shape, dtype)


def _refuse_what_nobody_sends(
    content: dict[str, Any], owned: Sequence[torch.Tensor | None], present: Sequence[torch.Tensor]
) -> None:
    """Refuse a survivor's tensor that does not fit.

    Replicated tensors go to joiners only, and its memory would be undefined.
    """
    paths = {slot: path for path, slot in tensor_slots(content["skeleton"])}
    for slot, (own, used, replicated) in enumerate(zip(owned, present, content["replicated"], strict=True)):
        if replicated and own is not used:
            theirs = f"{content['shapes'][slot][1]} of shape {tuple(content['shapes'][slot][0])}"
            ours = "missing" if own is None else f"{str(own.dtype).removeprefix('torch.')} of shape {tuple(own.shape)}"
            raise InvalidTraining(
                f"the state {'/'.join(map(str, paths[slot]))} is {theirs} on rank 0 and {ours} on this replica; all "
                "replicas must build the same models and optimizers"
            )


def _pass_on(group: ReplicaGroup, tensors: list[torch.Tensor], joiners: Sequence[int]) -> None:
    """Send from survivors to the joiners that each is given."""
    survivors = [rank for rank in range(group.world_size) if rank not in joiners]
    server_of = {joiner: survivors[index % len(survivors)] for index, joiner in enumerate(joiners)}
    if group.rank in joiners:
        group.receive_tensors([_as_bytes(tensor) for tensor in tensors], source=server_of[group.rank])
    mine = [joiner for joiner, server in server_of.items() if server == group.rank]
    if mine:
        group.send_tensors([_as_bytes(tensor) for tensor in in_host_memory(tensors)], targets=mine)
