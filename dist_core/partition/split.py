"""The part of a model that a stage is: the whole model, without the blocks of the other stages.

What remains keeps its names, so that a stage's state is a part of the model's. A block in a list or a dictionary of
modules is taken out of it, as the model's loop over them then expects; one that is an attribute of its own becomes a
module that hands its first argument on.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Sequence
from typing import Any

from torch import nn

from dist_core.errors import InvalidTraining
from dist_core.partition.balance import Partition


class HandsOn(nn.Module):
    """Placeholder for a block of another stage."""

    def forward(self, first: Any, *_: Any, **__: Any) -> Any:
        return first


def without_other_blocks(
    model: nn.Module, names: Sequence[str], kept: Collection[str], *, memo: dict[int, Any] | None = None
) -> nn.Module:
    """Return a copy of the model with ``kept`` of the blocks ``names``; what is no block is in every stage.

    ``memo``: what is not to be copied but to be the same here and there, by its identity, as for ``copy.deepcopy``.
    """
    unknown = sorted(set(kept) - set(names))
    if unknown:
        raise InvalidTraining(f"{unknown[0]!r} is not a block of this model; its blocks are {', '.join(names)}")
    stage = copy.deepcopy(model, memo)
    for name in names:
        if name not in kept:
            path, _, last = name.rpartition(".")
            holder = stage.get_submodule(path)
            if isinstance(holder, (nn.ModuleList, nn.ModuleDict, nn.Sequential)):
                # By its key: what stays is not numbered anew.
                del holder._modules[last]
            else:
                setattr(holder, last, HandsOn())
    return stage


def stages_of(model: nn.Module, names: Sequence[str], found: Partition) -> list[nn.Module]:
    """Return a model for each stage; the output of one is the input of the next."""
    return [without_other_blocks(model, names, {block.name for block in stage.blocks}) for stage in found.stages]
