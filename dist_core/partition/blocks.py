"""Costs of a model's blocks and devices of a pipeline: the input of a partition, without torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from dist_core.errors import InvalidTraining


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockCosts:
    """Costs of one block, for one microbatch on a device of speed 1."""

    name: str
    """Name of its module in the model."""
    forward_seconds: float
    backward_seconds: float
    parameter_bytes: int = 0
    activation_bytes: int = 0
    """Kept from the forward pass to the backward pass."""
    output_bytes: int = 0
    """Sent to the next stage behind a cut, and as gradient back."""

    def __post_init__(self) -> None:
        for name in ("forward_seconds", "backward_seconds", "parameter_bytes", "activation_bytes", "output_bytes"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise InvalidTraining(f"{name} of block {self.name!r} is {value!r}; it must be a number of at least 0")

    @property
    def seconds(self) -> float:
        return self.forward_seconds + self.backward_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class StageDevice:
    name: str = "device"
    speed: float = 1.0
    """Relative to the device that the blocks were measured on."""
    memory_bytes: float = math.inf

    def __post_init__(self) -> None:
        if not self.speed > 0 or not self.memory_bytes > 0:
            raise InvalidTraining(
                f"the device {self.name!r} has speed {self.speed!r} and {self.memory_bytes!r} bytes of memory; both "
                "must be above 0"
            )


def tied_together(blocks: Sequence[BlockCosts], ties: Sequence[Sequence[str]]) -> list[tuple[int, int]]:
    """Ranges ``[first, last]`` of blocks between which no cut may lie, because their ends share a parameter.

    ``ties``: names of blocks that share one.
    """
    position = {block.name: index for index, block in enumerate(blocks)}
    ranges = sorted((min(position[name] for name in tie), max(position[name] for name in tie)) for tie in ties)
    merged: list[tuple[int, int]] = []
    for first, last in ranges:
        if merged and first < merged[-1][1]:
            merged[-1] = merged[-1][0], max(merged[-1][1], last)
        elif last > first:
            merged.append((first, last))
    return merged
