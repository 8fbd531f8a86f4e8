"""Costs of a model's blocks, measured on a batch, or estimated for a model on the meta device.

The model computes once, so that each block's inputs are known; then every block computes forwards and backwards alone,
a few times. What lies between the blocks in the model's own code belongs to nobody, and is little where blocks are what
the model consists of.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from dist_core.device import device_of
from dist_core.errors import InvalidTraining
from dist_core.partition.blocks import BlockCosts
from dist_core.torch_private import memory_of

REPEATS = 5
BACKWARD_FACTOR = 2.0
"""Operations of a backward pass over the forward pass's: one product for the weights, one for the inputs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceProfile:
    """A device that the model is not on, for an estimate."""

    flops_per_second: float
    bytes_per_second: float
    """Bandwidth of its memory: a block that computes little takes as long as its numbers need to come and go."""


@dataclass(frozen=True, slots=True)
class _Call:
    """Inputs of a block in the model's forward pass."""

    arguments: tuple[Any, ...]
    named: Mapping[str, Any]
    result: Any


def measure_blocks(
    model: nn.Module, names: Sequence[str], microbatch: Any, *, repeats: int = REPEATS, warm_up: int = 1
) -> list[BlockCosts]:
    """Measure each block on the model's device: medians over ``repeats`` passes.

    ``names``: of the blocks' modules, in the order that the model calls them. ``microbatch``: what the model is called
    with, a tensor or a tuple of arguments. Gradients are as they were afterwards; batch norms have seen the microbatch.
    """
    calls = _calls(model, names, microbatch)
    return [_measured(name, model.get_submodule(name), calls[name], repeats, warm_up) for name in names]


def estimate_blocks(
    model: nn.Module, names: Sequence[str], microbatch: Any, profile: DeviceProfile
) -> list[BlockCosts]:
    """Estimate the blocks of a model on the meta device, which holds no memory, from operations and bytes."""
    # What the model's own code makes on the way, masks and positions, is nowhere either.
    with torch.device("meta"):
        calls = _calls(model, names, microbatch)
        return [_estimated(name, model.get_submodule(name), calls[name], profile) for name in names]


def ties_between(model: nn.Module, names: Sequence[str]) -> list[tuple[str, ...]]:
    """Names of blocks that share a parameter, for each such parameter."""
    holders: dict[int, list[str]] = {}
    for name in names:
        for parameter in {id(each) for each in model.get_submodule(name).parameters()}:
            holders.setdefault(parameter, []).append(name)
    return sorted({tuple(each) for each in holders.values() if len(each) > 1})


def _calls(model: nn.Module, names: Sequence[str], microbatch: Any) -> dict[str, _Call]:
    calls: dict[str, _Call] = {}

    def note(name: str) -> Callable[..., None]:
        def hook(_: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any], result: Any) -> None:
            if name in calls:
                raise InvalidTraining(
                    f"the block {name!r} is called twice in one forward pass; a stage would have to run twice. Name "
                    "the module that contains both calls as one block"
                )
            calls[name] = _Call(arguments, named, result)

        return hook

    with _hooks(model, names, note), torch.no_grad():
        model(*microbatch) if isinstance(microbatch, tuple) else model(microbatch)
    missing = [name for name in names if name not in calls]
    if missing:
        raise InvalidTraining(
            f"the model's forward pass does not call the block {missing[0]!r}; name the modules that it calls, one "
            "after another"
        )
    if list(calls) != list(names):
        raise InvalidTraining(
            f"the model calls its blocks in the order {', '.join(calls)}, but they were named in the order "
            f"{', '.join(names)}; name them in the order of the calls"
        )
    return calls


@contextmanager
def _hooks(model: nn.Module, names: Sequence[str], note: Callable[[str], Callable[..., None]]) -> Iterator[None]:
    handles = []
    try:
        for name in names:
            try:
                block = model.get_submodule(name)
            except AttributeError as error:
                raise InvalidTraining(f"the model has no module {name!r}: {error}") from error
            handles.append(block.register_forward_hook(note(name), with_kwargs=True))
        yield
    finally:
        for handle in handles:
            handle.remove()


def _measured(name: str, block: nn.Module, call: _Call, repeats: int, warm_up: int) -> BlockCosts:
    kept = [parameter.grad for parameter in block.parameters()]
    forwards, backwards, activations = [], [], 0
    try:
        for _ in range(warm_up + repeats):
            for parameter in block.parameters():
                parameter.grad = None
            forward, backward, activations = _passes(block, call)
            forwards.append(forward)
            backwards.append(backward)
    finally:
        for parameter, gradient in zip(block.parameters(), kept, strict=True):
            parameter.grad = gradient
    return BlockCosts(
        name=name,
        forward_seconds=statistics.median(forwards[warm_up:]),
        backward_seconds=statistics.median(backwards[warm_up:]),
        parameter_bytes=_parameter_bytes(block),
        activation_bytes=activations,
        output_bytes=_bytes_of(_tensors(call.result)),
    )


def _passes(block: nn.Module, call: _Call) -> tuple[float, float, int]:
    """Seconds of a forward and a backward pass, and the bytes that were kept in between."""
    arguments, named = _apart(call.arguments), _apart(call.named)
    device = device_of(next(iter(_tensors((arguments, named, list(block.parameters()))))))
    kept = _Kept(block)
    device.mark().wait()
    began = time.perf_counter()
    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(kept.pack, lambda tensor: tensor):
        result = block(*arguments, **named)
    device.mark().wait()
    computed = time.perf_counter()
    outputs = [each for each in _tensors(result) if each.requires_grad]
    if outputs:
        torch.autograd.backward(outputs, [torch.ones_like(each) for each in outputs])
    device.mark().wait()
    return computed - began, time.perf_counter() - computed, kept.bytes


class _Kept:
    """Memory that a backward pass needs, each piece once; parameters are there in any case."""

    def __init__(self, block: nn.Module) -> None:
        self._known = {memory_of(parameter) for parameter in block.parameters()}
        self.bytes = 0

    def pack(self, tensor: torch.Tensor) -> torch.Tensor:
        if memory_of(tensor) not in self._known:
            self._known.add(memory_of(tensor))
            self.bytes += tensor.untyped_storage().nbytes()
        return tensor


def _estimated(name: str, block: nn.Module, call: _Call, profile: DeviceProfile) -> BlockCosts:
    counter = FlopCounterMode(display=False)
    kept = _Kept(block)
    saving = torch.autograd.graph.saved_tensors_hooks(kept.pack, lambda tensor: tensor)
    with counter, torch.enable_grad(), saving:
        # Held until all is counted: memory that is given back is known under another tensor's number.
        result = block(*_apart(call.arguments), **_apart(call.named))
    del result
    parameters, outputs = _parameter_bytes(block), _bytes_of(_tensors(call.result))
    moved = (parameters + kept.bytes + outputs) / profile.bytes_per_second
    forward = max(counter.get_total_flops() / profile.flops_per_second, moved)
    return BlockCosts(
        name=name,
        forward_seconds=forward,
        backward_seconds=BACKWARD_FACTOR * forward,
        parameter_bytes=parameters,
        activation_bytes=kept.bytes,
        output_bytes=outputs,
    )


def _parameter_bytes(block: nn.Module) -> int:
    return sum(parameter.nbytes for parameter in block.parameters())


def _bytes_of(tensors: Iterator[torch.Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for each in value.values():
            yield from _tensors(each)
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from _tensors(each)


def _apart(value: Any) -> Any:
    """Detach the values from the model's pass; gradients reach them, as they would a stage's input."""
    if isinstance(value, torch.Tensor):
        return value.detach().requires_grad_(value.is_floating_point())
    if isinstance(value, Mapping):
        return {key: _apart(each) for key, each in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*map(_apart, value))
    if isinstance(value, (list, tuple)):
        return type(value)(map(_apart, value))
    return value
