"""Microbatches of a pipeline: how examples are divided into them, and in which order stages compute them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B
from torch.distributed.pipelining.schedules import ScheduleLoopedBFS

from dist_core.errors import InvalidTraining
from dist_core.partition.balance import Partition, PipelineTerms, Schedule

_MADE_BY: dict[str, Any] = {"simple": ScheduleGPipe, "1f1b": Schedule1F1B, "interleaved": ScheduleInterleaved1F1B}


@dataclass(frozen=True, slots=True)
class ScheduleKind:
    terms: Schedule
    chunks: int
    """Stages of each process."""

    def stages_of(self, process: int, processes: int) -> list[int]:
        return list(range(process, processes * self.chunks, processes))

    def process_of(self, stage: int, processes: int) -> int:
        return stage % processes

    def multiple_of(self, processes: int) -> int:
        """Return the number that the count of microbatches has to be divisible by."""
        return processes if self.terms == "interleaved" else 1

    def stages(
        self,
        modules: Sequence[nn.Module],
        indices: Sequence[int],
        num_stages: int,
        place: torch.device,
        group: dist.ProcessGroup,
    ) -> list[PipelineStage]:
        return [
            PipelineStage(module, index, num_stages, place, group=group)
            for module, index in zip(modules, indices, strict=True)
        ]

    def make(
        self,
        stages: Sequence[PipelineStage],
        part: Division,
        num_stages: int,
        loss: Callable[[Any, Any], torch.Tensor] | None,
    ) -> Any:
        """Return the schedule for that many microbatches; too few of them are computed one stage after another."""
        made_by = _MADE_BY[self.terms]
        odd = part.count % self.multiple_of(num_stages // self.chunks)
        if loss is None or part.count < num_stages or odd:
            made_by = ScheduleGPipe if self.chunks == 1 else ScheduleLoopedBFS
        given = stages[0] if self.chunks == 1 else list(stages)
        return made_by(given, part.count, loss_fn=loss, scale_grads=False)


def schedule_kind(name: str, chunks: int) -> ScheduleKind:
    """Return the schedule of that name. Raises InvalidTraining for one that does not exist."""
    terms: Schedule
    if name == "interleaved":
        if chunks < 2:
            raise InvalidTraining(f"chunks is {chunks}; schedule='interleaved' needs at least 2 stages per process")
        return ScheduleKind("interleaved", chunks)
    if name == "1f1b":
        terms = "1f1b"
    elif name == "simple":
        terms = "simple"
    else:
        raise InvalidTraining(f"schedule is {name!r}; choose 'simple', '1f1b' or 'interleaved'")
    return ScheduleKind(terms, 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Division:
    """``count`` microbatches of ``size`` examples each, of the examples from ``first`` on."""

    first: int
    count: int
    size: int

    @property
    def stop(self) -> int:
        return self.first + self.count * self.size


def largest_microbatch(partition: Partition, terms: PipelineTerms, room: float) -> int | None:
    """Examples of a microbatch for which every stage has memory, at least 1; None where nothing limits them.

    ``partition``: of blocks as they are for one example; ``room``: bytes of a stage's device.
    """
    most = math.inf
    for index, stage in enumerate(partition.stages):
        kept = sum(block.activation_bytes for block in stage.blocks) * terms.in_flight(index, len(partition.stages))
        fixed = terms.state_factor * sum(block.parameter_bytes for block in stage.blocks)
        if kept:
            most = min(most, (room - fixed) / kept)
    return None if math.isinf(most) else max(1, int(most))


def divided(examples: int, most: int, num_stages: int, multiple_of: int, largest: int | None = None) -> list[Division]:
    """Divide all examples into at most ``most`` microbatches, and a rest behind them.

    There is no rest where the examples can be divided evenly into no fewer microbatches than stages. ``multiple_of``:
    what the schedule wants their number to be divisible by. There are more than ``most`` where memory has room for
    ``largest`` examples in one.
    """
    least = 1 if largest is None else -(-examples // largest)
    most = max(most, least)
    even = [
        count
        for count in range(min(most, examples), max(num_stages, least) - 1, -1)
        if examples % count == 0 and count % multiple_of == 0
    ]
    if even:
        return [Division(first=0, count=even[0], size=examples // even[0])]
    size = -(-examples // most)
    count = examples // size // multiple_of * multiple_of or examples // size
    divisions = [Division(first=0, count=count, size=size)]
    while divisions[-1].stop < examples:
        rest = examples - divisions[-1].stop
        taken = min(size, rest)
        divisions.append(Division(first=divisions[-1].stop, count=rest // taken, size=taken))
    return divisions
