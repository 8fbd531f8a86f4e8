"""Squared gradient norms, plain or preconditioned as Adam divides its gradients, in one read pass and exact to 1e-8.

The noise scale subtracts two norms that are nearly equal, so a float32 sum over millions of elements is too coarse and
a float64 copy too slow. Partial sums over short rows are both fast and exact. Answers are 0-dimensional float64
tensors on the gradients' device: nothing here waits for a GPU.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from dist_core.device import device_of
from dist_core.errors import InvalidTraining
from dist_core.gradients.optimizers import parameters_of
from dist_core.state.parts import local_of

_ROW = 16384
"""Length of the partial sums: float32 sums this short keep the error near 1e-8."""
ADAM_WARM_UP = 5
"""Steps before Adam's second moments mean something (AdaptDL's count as well)."""
_ADAM_FAMILY = ("Adam", "AdamW", "NAdam", "RAdam")


def squared_norm(tensor: torch.Tensor) -> torch.Tensor:
    whole = tensor.numel() // _ROW * _ROW
    total = torch.zeros((), dtype=torch.float64, device=tensor.device)
    if whole:
        rows = tensor[:whole].view(-1, _ROW)
        # In float32 at least: half precision would round the sums, or overflow.
        total += torch.linalg.vector_norm(rows, dim=1, dtype=_at_least_single(tensor)).double().square_().sum()
    if whole < tensor.numel():
        # Not in place: in double precision these are the gradients themselves.
        total += tensor[whole:].double().square().sum()
    return total


def _at_least_single(tensor: torch.Tensor) -> torch.dtype:
    return tensor.dtype if tensor.dtype == torch.float64 else torch.float32


def values_of(gradient: torch.Tensor) -> torch.Tensor:
    """Return a gradient's numbers as a flat tensor; of a sparse one, those that are there."""
    gradient = local_of(gradient)
    return gradient.coalesce().values().reshape(-1) if gradient.is_sparse else in_memory_order(gradient)


def squared_norm_of_all(gradients: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
    norms = [squared_norm(values_of(gradient)) for _, gradient in gradients]
    return summed(norms) if norms else torch.zeros((), dtype=torch.float64)


def summed(numbers: Sequence[torch.Tensor]) -> torch.Tensor:
    """Sum on the device of the first number: a model that is spread over several devices has some on each."""
    place = numbers[0].device
    return torch.stack([each.to(place) for each in numbers]).sum()


@dataclass(frozen=True, slots=True)
class Segment:
    """Position of one parameter's gradient in a flat buffer."""

    parameter: torch.Tensor
    start: int
    stop: int


def segments_of(parameters: Iterable[torch.Tensor]) -> tuple[Segment, ...]:
    """Return the segments of a buffer that holds these parameters' gradients one after another."""
    segments = []
    start = 0
    for parameter in parameters:
        segments.append(Segment(parameter, start, start + parameter.numel()))
        start += parameter.numel()
    return tuple(segments)


def in_memory_order(tensor: torch.Tensor) -> torch.Tensor:
    """Return a flat view in the order of memory, which is how buckets hold dense tensors of any stride.

    Of any other tensor it is a flat copy.
    """
    if tensor.is_contiguous():
        return tensor.view(-1)
    expected = 1
    for size, stride in sorted(zip(tensor.shape, tensor.stride(), strict=True), key=lambda pair: pair[1]):
        if size != 1 and stride != expected:
            return tensor.reshape(-1)
        expected *= size
    return tensor.as_strided((tensor.numel(),), (1,))


class AdamPreconditioner:
    """Norms of gradients divided by ``sqrt(v / (1 - beta2^t)) + eps``, as Adam divides its steps.

    Raises InvalidTraining for an optimizer without such second moments.
    """

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        for optimizer in optimizers:
            if not is_adam(optimizer):
                raise InvalidTraining(
                    "preconditioned=True needs the second moments of an Adam optimizer, but "
                    f"{type(optimizer).__name__} is not one of {', '.join(_ADAM_FAMILY)}; leave out preconditioned"
                )
        self._optimizers = list(optimizers)
        self._groups: dict[int, tuple[int, dict[str, Any]]] = {}
        """Index of the optimizer and its settings, by parameter."""
        self._steps: list[int] | None = None
        """Steps of each optimizer."""
        self._local = threading.local()
        """Norms are taken by the thread that computes gradients and by the one that reduces them."""

    def stepped(self, optimizer: torch.optim.Optimizer) -> None:
        """Note that one of the optimizers has stepped once more."""
        if self._steps is not None:
            for index, each in enumerate(self._optimizers):
                self._steps[index] += each is optimizer

    def forget(self) -> None:
        """Forget what is known of the optimizer's state, which was replaced."""
        self._steps = None
        self._groups.clear()

    @property
    def ready(self) -> bool:
        """Tell whether the second moments have warmed up."""
        if self._steps is None:
            # Read once: on a GPU the count may live there, and reading it waits.
            self._steps = [
                max((int(state["step"]) for state in each.state.values() if "step" in state), default=0)
                for each in self._optimizers
            ]
        # Of several optimizers of a model in parts, some may have no parameter here.
        used = [steps for steps, each in zip(self._steps, self._optimizers, strict=True) if parameters_of(each)]
        return min(used, default=ADAM_WARM_UP) >= ADAM_WARM_UP

    def squared_norm(self, buffer: torch.Tensor, segments: Sequence[Segment], start: int, stop: int) -> torch.Tensor:
        """Return the squared norm of the part ``[start, stop)`` of a flat buffer that holds the segments' gradients."""
        self._read_groups()
        total = torch.zeros((), dtype=torch.float64, device=buffer.device)
        for segment in segments:
            low, high = max(start, segment.start), min(stop, segment.stop)
            if low < high:
                offset = low - segment.start
                total += self._of_parameter(segment.parameter, buffer[low:high], offset)
        return total

    def squared_norm_of_all(self, gradients: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
        """Return the squared norm of all (parameter, gradient) pairs; those that Adam does not train count nothing."""
        self._read_groups()
        norms = [self._of_parameter(parameter, values_of(gradient), 0) for parameter, gradient in gradients]
        return summed(norms) if norms else torch.zeros((), dtype=torch.float64)

    def _read_groups(self) -> None:
        if not self._groups:
            self._groups = {
                id(parameter): (index, group)
                for index, optimizer in enumerate(self._optimizers)
                for group in optimizer.param_groups
                for parameter in group["params"]
            }

    def _of_parameter(self, parameter: torch.Tensor, gradient: torch.Tensor, offset: int) -> torch.Tensor:
        index, group = self._groups.get(id(parameter), (0, {}))
        state = self._optimizers[index].state.get(parameter, {})
        if "exp_avg_sq" not in state or not group or not gradient.numel():
            # Of a shard without a row; or not trained by this optimizer: no part of its steps, and none of their noise.
            return torch.zeros((), dtype=torch.float64, device=gradient.device)
        moments = values_of(state.get("max_exp_avg_sq", state["exp_avg_sq"]))
        moments = moments[offset : offset + gradient.numel()]
        assert self._steps is not None
        # sqrt(v / c) + eps = (sqrt(v) + eps sqrt(c)) / sqrt(c): the constant c leaves the loop.
        correction = 1.0 - group["betas"][1] ** self._steps[index]
        epsilon = group["eps"] * math.sqrt(correction)
        size = min(device_of(gradient).chunk, gradient.numel())
        memory = self._scratch(gradient.device, size)
        total: torch.Tensor = torch.zeros((), dtype=torch.float64, device=gradient.device)
        for first in range(0, gradient.numel(), size):
            part = gradient[first : first + size]
            scratch = memory[: part.numel()]
            torch.sqrt(moments[first : first + size], out=scratch)
            scratch.add_(epsilon)
            torch.div(part, scratch, out=scratch)
            # Short enough for a float32 sum on a CPU; a GPU sums in a tree.
            total += torch.dot(scratch, scratch)
        return total.mul_(correction)

    def _scratch(self, place: torch.device, size: int) -> torch.Tensor:
        """Kept for each thread where it is the host's memory; a GPU's allocator knows which stream uses what."""
        if not device_of(place).is_host:
            return torch.empty(size, dtype=torch.float32, device=place)
        kept: torch.Tensor | None = getattr(self._local, "scratch", None)
        if kept is None or kept.numel() < size:
            self._local.scratch = kept = torch.empty(size, dtype=torch.float32)
        return kept


def is_adam(optimizer: torch.optim.Optimizer) -> bool:
    return any(base.__name__ in _ADAM_FAMILY for base in type(optimizer).__mro__)
