"""Trained: what a LightningModule trains, as modules that can be wrapped; a loss passes through them unchanged.

A training step may compute with any parts of its module, in any order. What tells a wrapper that gradients are about
to come is the backward pass, which Lightning makes through its strategy.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import nn


class Trained(nn.Module):
    """The whole module, or, where several optimizers train parts of it, one part, with tensors by their names."""

    def __init__(self, module: nn.Module | None = None) -> None:
        super().__init__()
        self.module = module

    def forward(self, loss: torch.Tensor) -> torch.Tensor:
        return loss


def trained_parts(module: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> list[Trained]:
    """One for each optimizer: all that no later one trains is in the first."""
    if len(optimizers) == 1:
        return [Trained(module)]
    owner = {
        id(parameter): index
        for index, optimizer in reversed(list(enumerate(optimizers)))
        for group in optimizer.param_groups
        for parameter in group["params"]
    }
    parts = [Trained() for _ in optimizers]
    for name, parameter in module.named_parameters():
        parts[owner.get(id(parameter), 0)].register_parameter(name.replace(".", "-"), parameter)
    kept = set(module.state_dict())
    for name, buffer in module.named_buffers():
        parts[0].register_buffer(name.replace(".", "-"), buffer, persistent=name in kept)
    return parts


def reached(loss: torch.Tensor) -> set[int]:
    """Identities of the parameters that a backward pass from here gives gradients to."""
    seen, found = set(), set()
    waiting: list[object] = [loss.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        variable = getattr(node, "variable", None)
        if variable is not None:
            found.add(id(variable))
        following: Iterable[tuple[object, int]] = getattr(node, "next_functions", ())
        waiting.extend(each for each, _ in following)
    return found
