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
    ScheduleLoopedBFS,
    get_schedule_class,
)

from dist_core.errors import InvalidTraining
from dist_core.larger.microbatches import Division
from dist_core.partition.balance import Schedule
from dist_core.partition.placement import device_of, stages_on
from dist_core.torch_private import schedule_in_v

OURS = {"simple": "GPipe", "interleaved": "Interleaved1F1B"}
_TERMS: dict[str, Schedule] = {
    "1F1B": "1f1b",
    "Interleaved1F1B": "interleaved",
    "InterleavedZeroBubble": "interleaved",
    "ZBVZeroBubble": "v",
    "DualPipeV": "v",
}


@dataclass(frozen=True, slots=True)
class ScheduleKind:
    made_by: Any
    chunks: int
    """Stages of each process."""

    @property
    def terms(self) -> Schedule:
        """As a partition knows it: how many microbatches' activations a stage keeps, and where stages lie."""
        return _TERMS.get(str(self.made_by.__name__).removeprefix("Schedule"), "simple")

    @property
    def in_v(self) -> bool:
        """Whether each process has a stage and its mirror (Qi et al., ICLR'24, section 6)."""
        return self.terms == "v"

    def stages_of(self, process: int, processes: int) -> list[int]:
        return stages_on(process, processes, self.chunks, in_v=self.in_v)

    def process_of(self, stage: int, processes: int) -> int:
        return device_of(stage, processes, in_v=self.in_v)

    def multiple_of(self, processes: int) -> int:
        """What a number of microbatches is to be divisible by."""
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
        """For that many microbatches; few are taken as torch's simplest schedule takes them."""
        made_by = self.made_by
        odd = part.count % self.multiple_of(num_stages // self.chunks)
        if loss is None or part.count < num_stages or odd:
            if self.in_v:
                return schedule_in_v(stages, part.count, loss)
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
            "'InterleavedZeroBubble', 'ZBVZeroBubble', 'DualPipeV'"
        ) from error
    several = issubclass(made_by, PipelineScheduleMulti)
    if several and chunks < 1:
        raise InvalidTraining(f"chunks is {chunks}; a process has at least 1 stage")
    kind = ScheduleKind(made_by, chunks if several else 1)
    if kind.in_v and chunks != 2:
        raise InvalidTraining(f"chunks is {chunks}; by {name!r} a process has 2 stages. Leave chunks= out")
    return kind
