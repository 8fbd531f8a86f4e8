"""Predicted costs of training a model with each layout, from estimates of what its blocks compute and keep.

Estimates, not measurements: every process has to find the same. Times count relative to each other only, and where
steps have been measured they count no more.
"""

from __future__ import annotations

import math
import os
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from dist_core.errors import InvalidTraining
from dist_core.goodput.layout_terms import LayoutTerms
from dist_core.gradients.noise.norms import is_adam
from dist_core.larger.stages import ANY_DEVICE, copied_to_meta, examples_in, on_meta
from dist_core.layout import SHARDED, STAGES, WHOLE, Layout
from dist_core.link.environment import SLOT_MEMORY
from dist_core.partition.balance import PipelineTerms, partition
from dist_core.partition.blocks import BlockCosts, StageDevice
from dist_core.partition.measure import estimate_blocks, ties_between

SHARDED_SECONDS = 1.05
"""Time of a sharded pass over the undivided model's: the cost of gathering weights behind computation."""
BYTES_PER_OPERATION = 1e-3
"""Bytes sent between two slots while one computes an operation, on current GPUs: 300 GB/s to 300 TFLOP/s."""
PROCESS_BYTES = 4e8
"""Bytes of the machine's memory for a process by itself: Python, torch, and some data. Not measured, as all
processes have to find the same."""
GATHERED_FOR = 64
"""Examples of a pass that weights are taken to be gathered for."""
GPU_SHARE = 0.92
"""Share of a GPU's memory for the model; the rest is the driver's, the libraries' and lost to fragmentation."""


@dataclass(frozen=True, slots=True)
class ModelCosts:
    """Costs of a model's blocks, from which those of each layout are predicted.

    ``blocks``: for ``examples`` examples; without an example their activations are not known, and count nothing.
    """

    blocks: tuple[BlockCosts, ...]
    examples: int
    ties: tuple[tuple[str, ...], ...]
    state_factor: float
    """Bytes that a parameter needs in all, of its own."""

    @property
    def seconds(self) -> float:
        """Seconds of the undivided model for one example."""
        return sum(block.seconds for block in self.blocks) / self.examples

    @property
    def parameter_bytes(self) -> int:
        return sum(block.parameter_bytes for block in self.blocks)


def model_costs(
    model: nn.Module, names: Sequence[str], optimizers: Sequence[torch.optim.Optimizer], example: Any
) -> ModelCosts:
    factor = state_factor(optimizers)
    if example is None:
        size = _parameter_bytes(model, optimizers, factor)
        blocks = [BlockCosts(name="model", forward_seconds=1.0, backward_seconds=2.0, parameter_bytes=size)]
        return ModelCosts(tuple(blocks), 1, (), factor)
    found = estimate_blocks(copied_to_meta(model), names, on_meta(example), ANY_DEVICE)
    blocks = [
        replace(each, parameter_bytes=_parameter_bytes(model.get_submodule(each.name), optimizers, factor))
        for each in found
    ]
    return ModelCosts(tuple(blocks), examples_in(example), tuple(ties_between(model, names)), factor)


def _parameter_bytes(module: nn.Module, optimizers: Sequence[torch.optim.Optimizer], factor: float) -> int:
    """Return bytes of weights, gradients and state, over ``factor``.

    Weights that are not trained have no more than themselves.
    """
    trained = {id(each) for optimizer in optimizers for group in optimizer.param_groups for each in group["params"]}
    return sum(
        each.nbytes if each.requires_grad and id(each) in trained else int(each.nbytes / factor)
        for each in module.parameters()
    )


def in_memory(costs: ModelCosts, *, recomputes: bool) -> list[BlockCosts]:
    """Return the blocks with what they keep of a microbatch of one example, the least that there is."""
    return [
        replace(
            each, activation_bytes=-(-(each.output_bytes if recomputes else each.activation_bytes) // costs.examples)
        )
        for each in costs.blocks
    ]


def predicted_terms(
    costs: ModelCosts,
    sizes: Iterable[int],
    kinds: Collection[str],
    recomputes: Collection[bool],
    *,
    memory: float = math.inf,
    microbatches: int | None = None,
    schedule: Any = "1f1b",
    chunks: int = 1,
) -> list[LayoutTerms]:
    """Return the terms of all possible layouts of these sizes and kinds; one slot holds the model undivided.

    Seconds are those of an example. ``recomputes``: whether activations may be, have to be, or must not be computed
    again. ``memory``: of a slot, in which stages are cut to fit.
    """
    terms_of_layouts: list[LayoutTerms] = []
    for size in sizes:
        for again in sorted(recomputes):
            if size == 1:
                terms_of_layouts.append(_whole(costs, Layout(1, WHOLE, again)))
                continue
            if SHARDED in kinds:
                terms_of_layouts.append(_sharded(costs, Layout(size, SHARDED, again)))
            if STAGES in kinds:
                count = microbatches or 4 * size * chunks
                terms = PipelineTerms(
                    microbatches=count, schedule=schedule, chunks=chunks, state_factor=costs.state_factor
                )
                try:
                    terms_of_layouts.append(_stages(costs, Layout(size, STAGES, again), terms, memory))
                except InvalidTraining:
                    # Fewer blocks than stages, or weights that belong together.
                    continue
    return terms_of_layouts


def slot_memory(place: torch.device, share: float) -> float | None:
    """Bytes that the model may take of a slot like this one; None where nothing limits them."""
    limit = os.environ.get(SLOT_MEMORY)
    if place.type == "cuda":
        total: float = torch.cuda.get_device_properties(place).total_memory
        return GPU_SHARE * share * total
    if not limit:
        return None
    return max(float(limit) - PROCESS_BYTES, 0.5 * float(limit))


def state_factor(optimizers: Sequence[torch.optim.Optimizer]) -> float:
    """Weights, gradients, and what the optimizer keeps of each parameter."""
    if all(map(is_adam, optimizers)):
        return 4.0
    plain = all(
        isinstance(each, torch.optim.SGD) and not any(group["momentum"] for group in each.param_groups)
        for each in optimizers
    )
    return 2.0 if plain else 3.0


def _whole(costs: ModelCosts, layout: Layout) -> LayoutTerms:
    return LayoutTerms(
        layout,
        costs.seconds * (_slower_by_recomputing(costs.blocks) if layout.recomputes else 1.0),
        costs.state_factor * costs.parameter_bytes,
        _activations(costs.blocks, recomputes=layout.recomputes) / costs.examples,
    )


def _sharded(costs: ModelCosts, layout: Layout) -> LayoutTerms:
    whole = _whole(costs, Layout(1, WHOLE, layout.recomputes))
    largest = max(block.parameter_bytes for block in costs.blocks)
    # Weights are gathered for both passes, gradients scattered after the second.
    sent = 3.0 * costs.parameter_bytes * (layout.slots - 1) / layout.slots
    at_speed = BYTES_PER_OPERATION * ANY_DEVICE.flops_per_second
    busy = sent / at_speed / GATHERED_FOR if len(costs.blocks) > 1 else 0.0
    fixed = whole.fixed_bytes / layout.slots + 2.0 * largest
    return LayoutTerms(layout, SHARDED_SECONDS * max(whole.seconds, busy), fixed, whole.example_bytes)


def _stages(costs: ModelCosts, layout: Layout, terms: PipelineTerms, memory: float) -> LayoutTerms:
    count = layout.slots * terms.chunks
    blocks = in_memory(costs, recomputes=layout.recomputes)
    try:
        devices = [StageDevice(name=f"stage {index}", memory_bytes=memory / terms.chunks) for index in range(count)]
        split = partition(blocks, devices, terms, ties=costs.ties)
    except InvalidTraining:
        # It does not fit, as its terms will say; unless it cannot be cut at all.
        split = partition(
            blocks, [StageDevice(name=f"stage {index}") for index in range(count)], terms, ties=costs.ties
        )
    slowest = max(sum(block.seconds for block in stage.blocks) for stage in split.stages) / costs.examples
    waits = (layout.slots - 1) / (terms.chunks * terms.microbatches)
    seconds = terms.chunks * slowest * (1.0 + waits)
    if layout.recomputes:
        seconds *= _slower_by_recomputing(costs.blocks)
    fixed, activations = [0.0] * layout.slots, [0.0] * layout.slots
    for index, stage in enumerate(split.stages):
        kept = sum(block.activation_bytes for block in stage.blocks) * terms.in_flight(index, count)
        place = terms.device_of(index, count)
        fixed[place] += costs.state_factor * sum(block.parameter_bytes for block in stage.blocks)
        activations[place] += kept / terms.microbatches
    again = max(block.activation_bytes for block in costs.blocks) / costs.examples / terms.microbatches
    return LayoutTerms(layout, seconds, max(fixed), max(activations) + (again if layout.recomputes else 0.0))


def _activations(blocks: Sequence[BlockCosts], *, recomputes: bool) -> float:
    """Bytes kept for the backward pass; recomputed, those of one block at a time and what went into each."""
    if not recomputes:
        return sum(block.activation_bytes for block in blocks)
    return sum(block.output_bytes for block in blocks) + max(block.activation_bytes for block in blocks)


def _slower_by_recomputing(blocks: Sequence[BlockCosts]) -> float:
    return 1.0 + sum(block.forward_seconds for block in blocks) / sum(block.seconds for block in blocks)
