"""Optimizers that were made for a whole model, of which this process has a part."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from dist_core.errors import InvalidTraining


def train_in_place_of(
    optimizers: Sequence[torch.optim.Optimizer], replaced: Mapping[int, torch.nn.Parameter | None]
) -> None:
    """Let optimizers train other parameters than they were made for, or none in their place.

    ``replaced``: by the identity of each parameter of the whole model. Raises InvalidTraining where one has stepped.
    """
    for optimizer in optimizers:
        if optimizer.state:
            raise InvalidTraining(
                f"{type(optimizer).__name__} took a step before its model was divided; create the model and the "
                "optimizer, wrap them, and then train"
            )
        for group in optimizer.param_groups:
            found = [replaced.get(id(each), each) for each in group["params"]]
            group["params"] = [each for each in found if each is not None]
