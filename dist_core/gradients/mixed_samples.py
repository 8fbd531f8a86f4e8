"""Losses whose gradient for one sample depends on other samples: contrastive ones, roots and quotients of means.

Each replica, and each pass of a divided step, has its own samples only, so the average of such losses' gradients is not
the gradient of the whole batch's loss. A loss that is a mean of each sample's own has no second derivative by the
outputs for two different samples; those that have one are found by it, however they are written.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch.autograd.function import BackwardCFunction

from dist_core.gradients.loss_means import walk

MOST_NODES_OF_MODEL = 20_000
MOST_ELEMENTS = 1 << 24
"""Outputs that are larger are not looked at: the look needs memory of several times their size."""
_TO_NOTICE = 1e-5
"""Least second derivative for two different samples, relative to the largest one."""


def mixes_samples(loss: torch.Tensor, rows: int, outputs: Sequence[torch.Tensor]) -> bool:
    """Tell whether the gradient for one of ``rows`` samples' outputs depends on the outputs for others.

    False where nothing tells: outputs without a dimension of samples, losses that are linear in pieces, that torch has
    no second derivative of, or that have a function of the script's own in them, which might change what it has saved.
    The graph stays as it is; what the script has hooked between the outputs and the loss is called.
    """
    if rows < 2:
        return False
    model = {each.grad_fn for each in outputs if each is not loss and each.grad_fn is not None}
    nodes = list(walk([loss.grad_fn], lambda node: node in model))
    if any("BatchNorm" in node.name() or isinstance(node, BackwardCFunction) for node in nodes if node not in model):
        # A norm mixes samples by itself, and is told of.
        return False
    if any(_takes_distances(node, model, rows) for node in nodes):
        # They have no second derivative in torch.
        return True
    nearest = _uppermost({node for node in nodes if node in model})
    looked_at = [each for each in outputs if each.grad_fn in nearest and _samples_dim(each, rows) is not None]
    # Beside outputs for each sample, those of another number may be made of weights.
    looked_at = [each for each in looked_at if rows in each.shape[:2]] or looked_at
    if not looked_at or sum(each.numel() for each in looked_at) > MOST_ELEMENTS:
        return False
    with ExitStack() as stack:
        for each in outputs:
            stack.enter_context(_unwatched(each))
        try:
            return _depends_on_others(loss, rows, looked_at)
        except RuntimeError:
            return False


def _uppermost(outputs: set[Any]) -> set[Any]:
    """Leave out nodes of outputs that others are computed from: between them lies the model, and not the loss."""
    if len(outputs) < 2:
        return outputs
    below, waiting, seen = set[Any](), [each for node in outputs for each, _ in node.next_functions], set[Any]()
    while waiting and len(seen) < MOST_NODES_OF_MODEL:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if node in outputs:
            below.add(node)
        waiting += [each for each, _ in node.next_functions]
    return outputs - below


def _depends_on_others(loss: torch.Tensor, rows: int, outputs: Sequence[torch.Tensor]) -> bool:
    """Differentiate the gradients of half of the samples, and look at what that is for the other half."""
    given = torch.autograd.grad(loss, outputs, create_graph=True, allow_unused=True)
    # Outputs of one node may be there for others than this loss.
    used = [(gradient, output) for gradient, output in zip(given, outputs, strict=True) if gradient is not None]
    first, outputs = [gradient for gradient, _ in used], [output for _, output in used]
    halves = [_halves(output, rows) for output in outputs]
    probe = torch.zeros((), device=loss.device)
    for gradient, output, (ours, _) in zip(first, outputs, halves, strict=True):
        # Uneven, for second derivatives may sum to zero; and no random numbers, which are the training's.
        direction = torch.arange(output.numel(), device=output.device).cos().view_as(output)
        probe = probe + (gradient * direction * ours).sum().to(probe.device)
    if not probe.requires_grad:
        return False
    second = torch.autograd.grad(probe, outputs, retain_graph=True, allow_unused=True)
    largest = among_others = 0.0
    for derivative, (_, others) in zip(second, halves, strict=True):
        if derivative is not None:
            largest = max(largest, float(derivative.abs().max()))
            among_others = max(among_others, float((derivative * others).abs().max()))
    return among_others > _TO_NOTICE * largest


def _samples_dim(output: torch.Tensor, rows: int) -> int | None:
    """Return the dimension of an output that its samples are in: the second one where sequences come first."""
    if not output.is_floating_point() or not output.numel():
        return None
    if output.dim() > 2 and rows in output.shape[:2]:
        return None if output.shape[0] == output.shape[1] else output.shape.index(rows)
    return 0 if output.dim() and output.shape[0] % rows == 0 else None


def _halves(output: torch.Tensor, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return masks of what is one half of the samples', and of the other half's.

    Several rows of a sample may follow one another, or come with those of all others, as two views of a batch do. Rows
    whose half depends on that are in neither. Neighbours and pairs at any distance are in different halves somewhere.
    """
    dim = _samples_dim(output, rows) or 0
    halves = torch.tensor([index.bit_count() % 2 == 1 for index in range(rows)], device=output.device)
    row = torch.arange(output.shape[dim], device=output.device)
    in_sequence, in_turns = halves[row // (output.shape[dim] // rows)], halves[row % rows]
    shape = [-1 if each == dim else 1 for each in range(output.dim())]
    return (in_sequence & in_turns).view(shape), (~in_sequence & ~in_turns).view(shape)


def _takes_distances(node: Any, model: Collection[Any], rows: int) -> bool:
    """Tell whether a node takes distances between rows that are all made of the model's outputs.

    Not those within each sample.
    """
    taken = getattr(node, "_saved_x1", None)
    if taken is not None and taken.dim() > 2 and taken.shape[0] % rows == 0:
        return False
    sides = {"Cdist": 2, "Pdist": 1}.get(node.name()[:5], 0)
    below = [walk([side], lambda each: each in model) for side, _ in node.next_functions[:sides]]
    return sides > 0 and all(any(each in model for each in side) for side in below)


@contextmanager
def _unwatched(output: torch.Tensor) -> Iterator[None]:
    """Keep hooks of this tensor from running within: no backward pass of the training reaches it there."""
    hooks = output._backward_hooks or {}
    kept = dict(hooks)
    hooks.clear()
    try:
        yield
    finally:
        hooks.update(kept)
