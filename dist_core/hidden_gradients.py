"""Gradients of a step's earlier micro-batches, kept where neither the user's code nor the optimizer sees them.

A step of several micro-batches is the user's loop body run several times. Whatever it does to gradients in between
(clip them, clear them) must not touch the sum. So each pass's gradients are taken away when its backward ends, and
given back when the last one's begins: clipping sees the whole step's gradient, once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from dist_core._torch_compat import after_backward, tensors_in
from dist_core.errors import InvalidTraining


class HiddenGradients:
    def __init__(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        self._parameters = [parameter for parameter in parameters if parameter.requires_grad]
        self._sums: list[torch.Tensor | None] = [None] * len(self._parameters)

    def take(self, weight: float) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Add ``weight`` times the present gradients to the hidden sums, and clear them.

        Returns the parameters with what was added for them; the sums share memory with it.
        """
        taken: list[tuple[torch.Tensor, torch.Tensor]] = []
        for index, parameter in enumerate(self._parameters):
            if parameter.grad is None:
                continue
            gradient, parameter.grad = parameter.grad, None
            if weight != 1.0:
                gradient.mul_(weight)
            taken.append((parameter, gradient))
            hidden = self._sums[index]
            self._sums[index] = gradient if hidden is None else hidden.add_(gradient)
        return taken

    def give_back(self) -> None:
        """Add the sums to the present gradients."""
        for index, parameter in enumerate(self._parameters):
            hidden, self._sums[index] = self._sums[index], None
            if hidden is not None:
                parameter.grad = hidden if parameter.grad is None else parameter.grad.add_(hidden)

    def drop(self) -> None:
        self._sums = [None] * len(self._parameters)


def around_backward(output: Any, *, begin: Callable[[], None] | None, end: Callable[[], None]) -> None:
    """Have ``begin`` run when a backward pass reaches the model's output, and ``end`` when that pass is complete.

    Raises InvalidTraining when no tensor is found in the output to notice the pass by.
    """
    tensors = [tensor for tensor in tensors_in(output) if tensor.requires_grad]
    if not tensors:
        raise InvalidTraining(
            f"the model returned {type(output).__name__} without a tensor that has a gradient; to train in several "
            "micro-batches return tensors, or lists, tuples and dicts of them"
        )
    running = False

    def reached(_: torch.Tensor) -> None:
        nonlocal running
        if running:
            return
        running = True
        if begin is not None:
            begin()
        after_backward(over)

    def over() -> None:
        nonlocal running
        running = False
        end()

    for tensor in tensors:
        tensor.register_hook(reached)  # type: ignore[no-untyped-call]  # not annotated in torch
