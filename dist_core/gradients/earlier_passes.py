"""Gradients of a step's earlier micro-batches, kept where neither the user's code nor the optimizer sees them.

A step of several micro-batches is the user's loop body run several times. Whatever it does to gradients in between
(clip them, clear them) must not touch the sum. So each pass's gradients are taken away when its backward ends, and
given back when the last one's begins: clipping sees the whole step's gradient, once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from dist_core.torch_private import after_backward, tensors_in


class EarlierGradients:
    def __init__(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        # Those that are frozen have no gradient, and may have one later.
        self._parameters = list(parameters)
        self._sums: dict[int, torch.Tensor] = {}
        self._saved_gradients: dict[int, torch.Tensor] = {}

    def take(self, weight: float) -> None:
        """Add ``weight`` times the present gradients to the hidden sums, and clear them."""
        for index, parameter in enumerate(self._parameters):
            if parameter.grad is None:
                continue
            gradient, parameter.grad = parameter.grad, None
            if gradient._is_view():
                # A part of one of DDP's buckets, which the last pass fills.
                gradient = gradient.clone()
            if weight != 1.0:
                gradient.mul_(weight)
            hidden = self._sums.get(index)
            self._sums[index] = gradient if hidden is None else hidden.add_(gradient)

    def set_aside(self, *, keep_views: bool) -> bool:
        """Before a last micro-batch's backward pass: clear what earlier passes of the same micro-batch left.

        ``keep_views``: keep it as a copy, because it lies in a bucket that is about to be used. Returns whether there
        was any.
        """
        for index, parameter in enumerate(self._parameters):
            if parameter.grad is not None:
                self._saved_gradients[index] = parameter.grad.clone() if keep_views else parameter.grad
            parameter.grad = None
        return bool(self._saved_gradients)

    def scale(self, factor: float) -> None:
        """Multiply the hidden sums."""
        for hidden in self._sums.values():
            hidden.mul_(factor)

    def give_back(self) -> None:
        """Make the hidden sums the gradients that the coming backward pass adds to."""
        for index, hidden in self._sums.items():
            present = self._parameters[index].grad
            self._parameters[index].grad = hidden if present is None else hidden.add_(present)
        self._sums = {}

    def join(self, factor: float) -> None:
        """Set gradients, after a pass, to ``factor`` x (new gradients + hidden sums) + the gradients set aside."""
        for index, parameter in enumerate(self._parameters):
            gradient, hidden = parameter.grad, self._sums.get(index)
            if hidden is not None:
                gradient = hidden if gradient is None else gradient.add_(hidden)
            if gradient is not None and factor != 1.0:
                gradient.mul_(factor)
            before = self._saved_gradients.get(index)
            if before is not None:
                gradient = before if gradient is None else gradient.add_(before)
            parameter.grad = gradient
        self._sums, self._saved_gradients = {}, {}

    def drop(self) -> None:
        self._sums, self._saved_gradients = {}, {}


def note_backward(output: Any, note: Callable[[], None]) -> None:
    """Have ``note`` run when a backward pass reaches the model's output; at once where nothing in it would tell."""

    def reached(_: torch.Tensor) -> None:
        note()

    if output is None:
        return
    tensors = [tensor for tensor in tensors_in(output) if tensor.requires_grad and not tensor.is_leaf]
    for tensor in tensors:
        tensor.register_hook(reached)  # type: ignore[no-untyped-call]  # not annotated in torch
    if not tensors:
        note()


@dataclass(slots=True)
class Backward:
    """Backward pass through a model's outputs, of which a loss may have several in it."""

    runs: bool = False
    handles: list[Any] = field(default_factory=list)
    """Hooks of weights by which it would be noticed."""

    def forget(self) -> None:
        self.runs = False
        for handle in self.handles:
            handle.remove()
        self.handles = []


def around_backward(
    output: Any,
    backward: Backward,
    *,
    begin: Callable[[], None] | None,
    end: Callable[[], None],
    weights: Sequence[nn.Parameter],
) -> None:
    """Have ``begin`` run when a backward pass reaches the model's output, and ``end`` when that pass is complete.

    Both run once where it reaches several outputs that were given the same ``backward``. ``begin`` also runs before any
    of ``weights`` gets a gradient: a loss may come by one, such as the scale of a contrastive loss, sooner than by the
    output. An output in which no tensor is found, such as a distribution, is known by its weights alone.
    """
    # A parameter that is returned as it is keeps its hooks, and is no sign that this pass's gradients are coming.
    tensors = [tensor for tensor in tensors_in(output) if tensor.requires_grad and not tensor.is_leaf]
    # One that still runs when a forward pass is made has failed, and tells nobody of its end.
    backward.forget()

    def reached(_: torch.Tensor) -> None:
        if backward.runs:
            return
        backward.runs = True
        if begin is not None:
            begin()
        # Twice, to come after DDP's own callback, which is registered when the last gradient is there.
        after_backward(lambda: after_backward(over))

    def over() -> None:
        backward.runs = False
        if tensors:
            backward.forget()
        end()

    for tensor in tensors:
        tensor.register_hook(reached)  # type: ignore[no-untyped-call]  # not annotated in torch
    if begin is not None or not tensors:
        trained = (weight for weight in weights if weight.requires_grad)
        backward.handles = [weight.register_hook(reached) for weight in trained]  # type: ignore[no-untyped-call]  # as above


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
                    parameter.register_hook(self._unweighted)  # type: ignore[no-untyped-call]  # not annotated in torch

    def _before(self, module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...] | None:
        return None if self.share == 1.0 else (_weighted(inputs[0], 1.0 / self.share), *inputs[1:])

    def _behind(self, module: nn.Module, inputs: tuple[Any, ...], output: torch.Tensor) -> torch.Tensor | None:
        return None if self.share == 1.0 else _weighted(output, self.share)

    def _unweighted(self, gradient: torch.Tensor) -> torch.Tensor:
        return gradient if self.share == 1.0 else gradient / self.share


def _weighted(values: torch.Tensor, weight: float) -> torch.Tensor:
    """Return the same values with their gradient multiplied by ``weight``."""
    weighted: torch.Tensor = _Weighted.apply(values, weight)  # type: ignore[no-untyped-call]  # not annotated in torch
    return weighted


class _Weighted(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, values: torch.Tensor, weight: float) -> torch.Tensor:
        context.weight = weight
        return values.view_as(values)

    @staticmethod
    def backward(context: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradients[0] * context.weight, None
