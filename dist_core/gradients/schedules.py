"""Knowledge of torch's learning rate schedules beyond ``step``: which ends, which takes a metric or a position.

And which there are for an optimizer, of which only the schedules know.
"""

from __future__ import annotations

import gc
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import (
    ChainedScheduler,
    CosineAnnealingWarmRestarts,
    LRScheduler,
    OneCycleLR,
    ReduceLROnPlateau,
    SequentialLR,
)

from dist_core.torch_private import schedules_within


def has_ended(schedule: Any) -> bool:
    """Tell whether a further step would raise: a one-cycle schedule that has made all of its steps."""
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


def schedules_unknown(optimizer: Optimizer, known: Iterable[Any]) -> list[LRScheduler]:
    """Schedules that set this optimizer's rates, and are neither known nor a part of one that is.

    Found by who holds on to the optimizer: some milliseconds, for once.
    """
    expected = {id(each) for schedule in known for each in _with_parts(schedule)}
    holders = gc.get_referrers(optimizer)
    # The attributes of an object are a dictionary once somebody has asked for them, and then that is what holds.
    attributes = [each for each in holders if type(each) is dict and each.get("optimizer") is optimizer]
    holders += [owner for each in attributes for owner in gc.get_referrers(each)]
    found = {id(each): each for each in holders if issubclass(type(each), LRScheduler) and each.optimizer is optimizer}
    parts = {id(part) for each in found.values() for part in _with_parts(each) if part is not each}
    return [each for number, each in found.items() if number not in expected | parts]


def _with_parts(schedule: Any) -> Iterator[Any]:
    yield schedule
    if isinstance(schedule, (SequentialLR, ChainedScheduler)):
        for part in schedules_within(schedule)[0]:
            yield from _with_parts(part)


def takes_metric(schedule: Any) -> bool:
    return isinstance(schedule, ReduceLROnPlateau)


def takes_position(schedule: Any) -> bool:
    """Tell whether ``step`` accepts a position in epochs and fractions of them."""
    return isinstance(schedule, CosineAnnealingWarmRestarts)
