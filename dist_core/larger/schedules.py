"""The order in which stages compute microbatches: torch's schedules, by our names for them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B
from torch.distributed.pipelining.schedules import ScheduleLoopedBFS

from dist_core.errors import InvalidTraining
from dist_core.larger.microbatches import Division
from dist_core.partition.balance import Schedule

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
