"""What is known of torch's learning rate schedules beyond ``step``: which ends, which takes a metric or a position."""

from __future__ import annotations

from bisect import bisect_right
from typing import Any

from torch.optim.lr_scheduler import (
    ChainedScheduler,
    CosineAnnealingWarmRestarts,
    OneCycleLR,
    ReduceLROnPlateau,
    SequentialLR,
)

from dist_core.torch_private import schedules_within


def has_ended(schedule: Any) -> bool:
    """Whether a further step would raise: a one-cycle schedule has made all of its steps."""
    if isinstance(schedule, OneCycleLR):
        return bool(schedule.last_epoch >= schedule.total_steps)
    if isinstance(schedule, SequentialLR):
        parts, milestones = schedules_within(schedule)
        following = schedule.last_epoch + 1
        part = parts[bisect_right(milestones, following)]
        # At a milestone the next part is set to its beginning.
        return following not in milestones and has_ended(part)
    if isinstance(schedule, ChainedScheduler):
        return any(has_ended(part) for part in schedules_within(schedule)[0])
    return False


def takes_metric(schedule: Any) -> bool:
    return isinstance(schedule, ReduceLROnPlateau)


def takes_position(schedule: Any) -> bool:
    """Whether ``step`` may be given where training stands, in epochs and parts of them."""
    return isinstance(schedule, CosineAnnealingWarmRestarts)
