"""A divided model's weights, whole again: gathered by the first process of a replica from the others."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from dist_core.generations.process_groups import ReplicaGroup
from dist_core.larger.divided_state import Held


def names_of_shared(model: nn.Module) -> dict[str, str]:
    """Names in its state dictionary of what is known by another of its names: weights that several modules share."""
    first: dict[int, str] = {}
    for name, each in [*model.named_parameters(), *model.named_buffers()]:
        first[id(each)] = name
    found = {name: first.get(id(each), name) for name, each in model.state_dict(keep_vars=True).items()}
    return {name: known for name, known in found.items() if name != known}


def gathered(held: Mapping[str, Held], shared: Mapping[str, str], group: ReplicaGroup) -> dict[str, torch.Tensor]:
    """Collective: all of a model's weights on the CPU, for its first process; nothing for the others.

    ``held``: what this process has of them; ``shared``: by ``names_of_shared``. Raises PeerLost.
    """
    whole: dict[str, torch.Tensor] = {}
    for source in range(group.world_size):
        mine = source == group.rank
        entries: list[Any] = [_entry(name, each) for name, each in held.items()] if mine else []
        for name, at, rows, of, kind in group.broadcast_json(entries, source=source):
            if mine:
                sent = held[name].rows.detach().cpu().contiguous()
                if source != 0:
                    group.send_tensors([sent], targets=[0])
                    continue
            elif group.rank != 0:
                continue
            else:
                sent = torch.empty(rows, dtype=getattr(torch, kind))
                group.receive_tensors([sent], source=source)
            if not of:
                whole[name] = sent.clone()
            else:
                whole.setdefault(name, torch.empty(of, dtype=sent.dtype))[at : at + len(sent)] = sent
    return whole | {name: whole[known] for name, known in shared.items()} if group.rank == 0 else {}


def _entry(name: str, held: Held) -> list[Any]:
    rows = held.rows
    return [name, held.at, list(rows.shape), list(held.of), str(rows.dtype).removeprefix("torch.")]
