"""Means that losses are, read off the graph that autograd has kept of them.

Replicas, and the passes of a divided step, average their gradients by their numbers of samples. That is the gradient of
the whole batch where each loss is a mean over its samples. A sum is something else, and so are a mean over class
weights or over the labels that are not ignored, and a loss that compares samples with each other.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch

MOST_NODES = 60
"""Nodes that are looked at: a loss is made of few, and what lies below is the model."""
_SUM, _MEAN = 2, 1
"""Numbers of torch's reductions."""
_SCALES = ("DivBackward", "MulBackward")
_PRODUCTS = ("MmBackward", "BmmBackward")
_FROM_WEIGHT = 3
"""Nodes between a weight and the product that it takes part in, at most: it is transposed, or viewed otherwise."""


def other_than_mean(loss: torch.Tensor, rows: int, outputs: Sequence[torch.Tensor] = ()) -> str | None:
    """Return what a loss of ``rows`` samples is, in words, if it is no mean over them; None where it looks like one.

    A sum that is divided or multiplied afterwards is taken for a mean. What lies below the model's ``outputs`` is not
    looked at.
    """
    model = {output.grad_fn for output in outputs if output is not loss}
    waiting, seen = [(loss.grad_fn, False)], 0
    while waiting and seen < MOST_NODES:
        node, scaled = waiting.pop(0)
        seen += 1
        if node is None or node in model:
            continue
        reduction = getattr(node, "_saved_reduction", None)
        sizes = getattr(node, "_saved_self_sym_sizes", ()) if node.name().startswith("SumBackward") else ()
        if not scaled and (reduction == _SUM or (rows > 1 and sizes and sizes[0] == rows)):
            return "a sum over the samples of a batch. Divide it by their number"
        if reduction == _MEAN and node.name().startswith("NllLoss"):
            words = _mean_over_labels(node)
            if words is not None:
                return words
        factors = node.next_functions if model and node.name().startswith(_PRODUCTS) else ()
        if factors and not any(_is_weight(below, model) for below, _ in factors):
            return (
                "a comparison of samples with each other, as in contrastive learning, and each replica and pass has "
                "its own samples only. Keep the trial at one size (min_replicas=max_replicas), without "
                "gradient_accumulation"
            )
        scaled = scaled or reduction is not None or _scales(node)
        waiting += [(below, scaled) for below, _ in node.next_functions]
    return None


Graph = tuple[str, ...]
"""Names of the operations that a loss was computed by, those next to it first."""


def graph_of(loss: torch.Tensor) -> Graph:
    """Return the operations of a loss that are nearest to it, ``MOST_NODES`` at most."""
    waiting: list[Any] = [loss.grad_fn]
    names: list[str] = []
    while waiting and len(names) < MOST_NODES:
        node = waiting.pop(0)
        if node is not None:
            names.append(node.name())
            waiting += [below for below, _ in node.next_functions]
    return tuple(names)


def _scales(node: Any) -> bool:
    """Tell whether it divides or multiplies, but not by the number 1, as trainers do that accumulate nothing."""
    if not node.name().startswith(_SCALES):
        return False
    factor = getattr(node, "_saved_other", None)
    if isinstance(factor, torch.Tensor):
        # One that lies on a GPU was computed: it is no number of the script's, and reading it would wait for it.
        return factor.device.type != "cpu" or factor.numel() != 1 or float(factor) != 1.0
    return factor != 1


def _is_weight(node: Any, model: Collection[Any]) -> bool:
    """Tell whether a factor is a weight, or needs no gradient, and is not made of what the model returned."""
    for _ in range(_FROM_WEIGHT):
        if node is None or not node.next_functions:
            return True
        if node in model:
            return False
        node = node.next_functions[0][0]
    return False


def _mean_over_labels(node: Any) -> str | None:
    labels = node._saved_target
    if abs(float(node._saved_total_weight) - labels.numel()) <= 1e-6 * labels.numel():
        return None
    if node._saved_weight is not None:
        return "a mean over class weights. Call loader.weigh(weights[labels].sum()) before backward()"
    return "a mean over the labels that are not ignored. Call loader.weigh(their number) before backward()"
