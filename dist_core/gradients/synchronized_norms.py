"""Synchronized batch norms of replicas whose shares of a batch differ in size.

torch's layer adds up over the replicas what the loss of each asks of the common mean and variance, as if all shares
were equally large. Shares are weighted here only where gradients are reduced, so what enters that sum is weighted
beforehand, and the weight is taken off again from what comes out of it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


class SynchronizedNorms:
    """Batch norms of a model, synchronized.

    ``share`` is this replica's part of the batch, 1 if all are equally large.
    """

    def __init__(self, model: nn.Module) -> None:
        self.share = 1.0
        self.are_there = False
        for module in model.modules():
            if not isinstance(module, nn.SyncBatchNorm):
                continue
            self.are_there = True
            module.register_forward_pre_hook(self._before)
            module.register_forward_hook(self._behind)
            for parameter in module.parameters(recurse=False):
                if parameter.requires_grad:
                    parameter.register_hook(self._unweighted)  # type: ignore[no-untyped-call]

    def _before(self, module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...] | None:
        return None if self.share == 1.0 else (_weighted(inputs[0], 1.0 / self.share), *inputs[1:])

    def _behind(self, module: nn.Module, inputs: tuple[Any, ...], output: torch.Tensor) -> torch.Tensor | None:
        return None if self.share == 1.0 else _weighted(output, self.share)

    def _unweighted(self, gradient: torch.Tensor) -> torch.Tensor:
        return gradient if self.share == 1.0 else gradient / self.share


def _weighted(values: torch.Tensor, weight: float) -> torch.Tensor:
    """Return the same values with their gradient multiplied by ``weight``."""
    weighted: torch.Tensor = _Weighted.apply(values, weight)  # type: ignore[no-untyped-call]
    return weighted


class _Weighted(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, values: torch.Tensor, weight: float) -> torch.Tensor:
        context.weight = weight
        return values.view_as(values)

    @staticmethod
    def backward(context: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradients[0] * context.weight, None
