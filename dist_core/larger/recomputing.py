"""Blocks that compute their activations again for the backward pass (Chen et al., 2016): time, to save memory."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint


def recompute_in(model: nn.Module, names: Sequence[str]) -> None:
    """Recompute activations in those of the blocks that the model has, with the same random numbers again.

    Not in those with a batch norm, which would count the batch twice.
    """
    present = dict(model.named_modules())
    for name in names:
        block = present.get(name)
        if block is None or not any(True for _ in block.parameters()):
            continue
        if not any(isinstance(each, nn.modules.batchnorm._BatchNorm) for each in block.modules()):
            block.forward = functools.partial(_recomputed, block.forward)


def _recomputed(forward: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    if not torch.is_grad_enabled():
        return forward(*arguments, **named)
    return checkpoint(forward, *arguments, use_reentrant=False, **named)
