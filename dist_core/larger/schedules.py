"""The order in which stages compute microbatches: torch's schedules, by our names for them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.pipelining.schedules import (
    PipelineScheduleMulti,
    ScheduleInterleaved1F1B,
    ScheduleLoopedBFS,
    get_schedule_class,
)

from dist_core.errors import InvalidTraining
from dist_core.larger.microbatches import Division
from dist_core.partition.balance import Schedule

OURS = {"simple": "GPipe", "interleaved": "Interleaved1F1B"}
_IN_V = ("ZBVZeroBubble", "DualPipeV")
"""Their stages lie on the processes there and back, which ours do not."""


@dataclass(frozen=True, slots=True)
class ScheduleKind:
    made_by: Any
    chunks: int
    """Stages of each process."""

    @property
    def terms(self) -> Schedule:
        """As a partition knows it: how many microbatches' activations a stage keeps."""
        return "1f1b" if self.made_by.__name__ in ("Schedule1F1B", "ScheduleInterleaved1F1B") else "simple"

    @property
    def multiple_of(self) -> int:
        return 1

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
        """For that many microbatches; few are taken as torch's simplest schedule takes them."""
        made_by = self.made_by
        processes = num_stages // self.chunks
        rounds = max(1, part.count // processes)
        uneven = made_by is ScheduleInterleaved1F1B and part.count % rounds
        if loss is None or part.count < num_stages or uneven:
            made_by = ScheduleGPipe if self.chunks == 1 else ScheduleLoopedBFS
        given = stages[0] if self.chunks == 1 else list(stages)
        return made_by(given, part.count, loss_fn=loss, scale_grads=False)


def schedule_kind(name: str, chunks: int) -> ScheduleKind:
    """Raises InvalidTraining for a name that does not exist."""
    try:
        made_by: Any = get_schedule_class(OURS.get(name, name))
    except ValueError as error:
        raise InvalidTraining(
            f"schedule is {name!r}; choose 'simple', '1f1b', 'interleaved', or a name of torch's: 'LoopedBFS', "
            "'InterleavedZeroBubble'"
        ) from error
    if made_by.__name__.removeprefix("Schedule") in _IN_V:
        raise InvalidTraining(f"schedule is {name!r}, which lays stages out in a V; choose 'interleaved'")
    several = issubclass(made_by, PipelineScheduleMulti)
    if several and chunks < 1:
        raise InvalidTraining(f"chunks is {chunks}; a process has at least 1 stage")
    return ScheduleKind(made_by, chunks if several else 1)
