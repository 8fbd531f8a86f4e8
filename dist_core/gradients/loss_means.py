"""Means that losses are, read off the graph that autograd has kept of them.

Replicas, and the passes of a divided step, average their gradients by their numbers of samples. That is the gradient of
the whole batch where each loss is a mean over its samples; a sum, or a mean over class weights or over the labels that
are not ignored, is something else.
"""

from __future__ import annotations

from typing import Any

import torch

MOST_NODES = 60
"""Nodes that are looked at: a loss is made of few, and what lies below is the model."""
_SUM, _MEAN = 2, 1
"""Numbers of torch's reductions."""
_SCALES = ("DivBackward", "MulBackward")


def other_than_mean(loss: torch.Tensor, rows: int) -> str | None:
    """Return what a loss of ``rows`` samples is, in words, if it is no mean over them; None where it looks like one.

    A sum that is divided or multiplied afterwards is taken for a mean.
    """
    waiting, seen = [(loss.grad_fn, False)], 0
    while waiting and seen < MOST_NODES:
        node, scaled = waiting.pop(0)
        seen += 1
        if node is None:
            continue
        reduction = getattr(node, "_saved_reduction", None)
        sizes = getattr(node, "_saved_self_sym_sizes", ()) if node.name().startswith("SumBackward") else ()
        if not scaled and (reduction == _SUM or (rows > 1 and sizes and sizes[0] == rows)):
            return "a sum over the samples of a batch. Divide it by their number"
        if reduction == _MEAN and node.name().startswith("NllLoss"):
            return _mean_over_labels(node)
        if reduction is None:
            scaled = scaled or node.name().startswith(_SCALES)
            waiting += [(below, scaled) for below, _ in node.next_functions]
    return None


def _mean_over_labels(node: Any) -> str | None:
    labels = node._saved_target
    if abs(float(node._saved_total_weight) - labels.numel()) <= 1e-6 * labels.numel():
        return None
    if node._saved_weight is not None:
        return "a mean over class weights. Call loader.weigh(weights[labels].sum()) before backward()"
    return "a mean over the labels that are not ignored. Call loader.weigh(their number) before backward()"
