"""Means that losses are, read off the graph that autograd has kept of them.

Replicas, and the passes of a divided step, average their gradients by their numbers of samples. That is the gradient of
the whole batch where each loss is a mean over its samples. A sum is something else, and so is a mean over class weights
or over the labels that are not ignored.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any

import torch

MOST_NODES = 60
"""Nodes that are looked at: a loss is made of few, and what lies below is the model."""
_SUM, _MEAN = 2, 1
"""Numbers of torch's reductions."""
_QUOTIENT = "DivBackward"
_SCALES = (_QUOTIENT, "MulBackward")
_SPREADS = ("StdBackward0", "VarBackward0")


def other_than_mean(
    loss: torch.Tensor,
    rows: int,
    outputs: Sequence[torch.Tensor] = (),
    *,
    batch: int | None = None,
    denominator: float | None = None,
) -> str | None:
    """Return what a loss of ``rows`` samples is, in words, if it is no mean over them; None where it looks like one.

    What lies below the model's ``outputs`` is not looked at. ``batch``: samples of all replicas and passes together.
    ``denominator``: number that sums of this pass are rightly divided by, where a trainer knows it.
    """
    model = {output.grad_fn for output in outputs if output is not loss}
    nothing_divides: tuple[float, ...] | None = ()
    waiting, seen = [(loss.grad_fn, nothing_divides)], 0
    while waiting and seen < MOST_NODES:
        node, divisors = waiting.pop(0)
        seen += 1
        if node is None or node in model:
            continue
        elements = _elements_summed(node, rows)
        if elements and divisors is not None and _is_made_of_samples(node, model, rows):
            words = _sum_of(elements, divisors, rows, rows if batch is None else batch, denominator)
            if words is not None:
                return words
        reduction = getattr(node, "_saved_reduction", None)
        words = _mean_over_labels(node) if reduction == _MEAN and node.name().startswith("NllLoss") else None
        averaged = _elements_averaged(node)
        is_mean = averaged > 1 and _is_made_of_samples(node, model, rows)
        if words is None and is_mean and averaged % rows:
            words = (
                f"a mean over {averaged} elements of {rows} samples, of which some have more than others. Call "
                "loader.weigh(number of elements) before backward()"
            )
        if words is None and is_mean and rows > 2 and any(math.isclose(each * rows, 1.0) for each in divisors or ()):
            words = f"a mean over the {rows} samples of a replica's pass, multiplied by {rows}. Leave that factor out"
        if words is not None:
            return words
        if is_mean or reduction is not None or node.name().startswith("MeanBackward1"):
            divisors = None
        elif divisors is not None and node.name().startswith(_SCALES):
            divisor = _divisor(node)
            divisors = None if divisor is None else (*divisors, divisor)
        if not (node.name().startswith("StackBackward") and len(node.next_functions) == rows):
            # Else each is one sample's loss.
            waiting += [(below, divisors) for below, _ in node.next_functions]
    return None


def _sum_of(elements: int, divisors: Sequence[float], rows: int, batch: int, denominator: float | None) -> str | None:
    """Return what a sum of so many elements of ``rows`` samples is, if nothing divides it by their number."""
    for divisor in divisors:
        if denominator is not None and math.isclose(divisor, denominator, rel_tol=1e-4):
            return None
        is_of_all = divisor == batch != rows and divisor != elements
        if divisor >= rows and abs(divisor / rows - round(divisor / rows)) < 1e-6 and not is_of_all:
            return None
    other = next((divisor for divisor in divisors if divisor > 2.0), None)
    if other is None:
        return "a sum over the samples of a batch. Divide it by their number"
    return (
        f"a sum over the {rows} samples of a replica's pass, divided by {other:g}. Divide it by their number; if it is "
        "a mean over something else, call loader.weigh(number of those) before backward()"
    )


def _elements_summed(node: Any, rows: int) -> int:
    """Return the number of elements that a node sums over all samples; 0 for any other node."""
    if getattr(node, "_saved_reduction", None) == _SUM:
        return int(_sized(node).numel())
    if rows == 1 or not node.name().startswith("SumBackward"):
        return 0
    sizes = node._saved_self_sym_sizes
    over_samples = node.name() == "SumBackward0" or (sizes[:1] == (rows,) and _is_over_first(node))
    elements = math.prod(sizes)
    return elements if over_samples and elements > 1 else 0


def _is_over_first(node: Any) -> bool:
    """Tell whether a sum or mean over some dimensions is over the first of them too."""
    dims = {dim if dim < 2**63 else dim - 2**64 for dim in node._saved_dim or ()}
    sizes = node._saved_self.shape if node.name() in _SPREADS else node._saved_self_sym_sizes
    return not dims or not dims.isdisjoint((0, -len(sizes)))


def _elements_averaged(node: Any) -> int:
    """Return the number of elements that a node averages over; 0 for any other node."""
    if node.name().startswith("MeanBackward0"):
        return int(node._saved_self_sym_numel)
    return int(_sized(node).numel()) if getattr(node, "_saved_reduction", None) == _MEAN else 0


def _sized(node: Any) -> torch.Tensor:
    """Return what a loss has a value for each element of."""
    labels = node.name().startswith("NllLoss")
    sized: torch.Tensor = node._saved_target if labels else node._saved_self
    return sized


def _is_made_of_samples(node: Any, model: Collection[Any], rows: int) -> bool:
    """Tell whether what a node reduces is the model's outputs, and no sum or mean of them, nor made of weights."""
    if not model:
        # The model has returned the loss itself: its sizes tell, where it has some.
        return bool(tuple(getattr(node, "_saved_self_sym_sizes", (rows,)))[:1] == (rows,))
    below = walk((each for each, _ in node.next_functions), lambda each: each in model or _reduces_samples(each))
    return any(each in model for each in below)


def _reduces_samples(node: Any) -> bool:
    if node.name() in ("MeanBackward1", "SumBackward1", *_SPREADS):
        return _is_over_first(node)
    return node.name() in ("MeanBackward0", "SumBackward0") or getattr(node, "_saved_reduction", 0) != 0


Graph = tuple[tuple[str, int], ...]
"""Operations that a loss was computed by, those next to it first; of a weight, which one it is."""


def graph_of(loss: torch.Tensor) -> Graph:
    """Return the operations of a loss that are nearest to it."""
    nodes = walk([loss.grad_fn], lambda node: False)
    variables = ((node, getattr(node, "variable", None)) for node in nodes)
    return tuple((node.name(), id(each) if isinstance(each, torch.nn.Parameter) else 0) for node, each in variables)


def walk(nodes: Iterable[Any], ends: Callable[[Any], bool]) -> Iterator[Any]:
    """Yield nodes of autograd's graph, nearest first and ``MOST_NODES`` at most; none below one where it ``ends``."""
    waiting, seen = deque(nodes), 0
    while waiting and seen < MOST_NODES:
        node = waiting.popleft()
        if node is None:
            continue
        seen += 1
        yield node
        if not ends(node):
            waiting.extend(below for below, _ in node.next_functions)


def _divisor(node: Any) -> float | None:
    """Return the number that a node divides by; None where it is not known: reading it from a GPU would wait for it."""
    factor = getattr(node, "_saved_other", None)
    if isinstance(factor, torch.Tensor):
        if factor.device.type != "cpu" or factor.numel() != 1:
            return None
        factor = factor.detach().item()
    if not isinstance(factor, (int, float)) or not factor or not math.isfinite(factor):
        return None
    return abs(factor if node.name().startswith(_QUOTIENT) else 1.0 / factor)


def _mean_over_labels(node: Any) -> str | None:
    labels = node._saved_target
    if abs(float(node._saved_total_weight) - labels.numel()) <= 1e-6 * labels.numel():
        return None
    if node._saved_weight is not None:
        return "a mean over class weights. Call loader.weigh(weights[labels].sum()) before backward()"
    return "a mean over the labels that are not ignored. Call loader.weigh(their number) before backward()"
