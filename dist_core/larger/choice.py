"""Choice of a layout, among those that a model's code can train with."""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import nn

from dist_core.errors import InvalidTraining
from dist_core.goodput.layout_terms import LayoutTerms
from dist_core.larger.alike import refuse_what_computes_otherwise
from dist_core.larger.predicted import model_costs, predicted_terms, slot_memory
from dist_core.larger.stages import blocks_of, finest
from dist_core.layout import STAGES, WHOLE, Layout
from dist_core.link.environment import gpu_share
from dist_core.trial.chosen_layout import ChosenLayout
from dist_core.trial.replica import Replica

logger = logging.getLogger(__name__)


def kinds_that_train(
    chosen: ChosenLayout,
    model: nn.Module,
    kinds: Collection[str],
    blocks: Sequence[str] | None,
    example: Any,
) -> Collection[str]:
    """Return the kinds of layout that can train the model: without stages if they would not compute what it does.

    Found before the trial trains, not hours later when the scheduler tries them.
    """
    others = [kind for kind in kinds if kind != STAGES]
    if chosen.is_settled or not chosen.is_choice or max(chosen.sizes) == 1 or len(others) == len(kinds):
        return kinds
    if not others and 1 not in chosen.sizes:
        return kinds
    names = list(blocks) if blocks is not None else blocks_of(model)
    try:
        found = finest(model, names)
        refuse_what_computes_otherwise(model, names, found, example)
    except InvalidTraining as error:
        logger.warning("this model is not divided into stages: %s", error)
        return others
    return kinds


def settle_layout(
    core: Replica,
    model: nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    place: torch.device,
    kinds: Collection[str],
    recomputes: Collection[bool],
    *,
    blocks: Sequence[str] | None = None,
    example: Any = None,
    **pipeline: Any,
) -> Layout:
    """Return the trial's layout, or the only one of these kinds if the trial has no choice.

    The layout of a trial's first model holds for all of them.

    ``pipeline``: its microbatches, schedule and chunks. Raises InvalidTraining for a model that does not fit, and
    ReplicaExit for one that fits with another layout than this replica's only.
    """
    chosen = core.layout
    if chosen.is_settled:
        return chosen.present
    memory = slot_memory(place, gpu_share())
    if not chosen.is_choice and len(kinds) == 1 and len(recomputes) == 1:
        # Nothing to weigh: only whether its weights have room.
        members = core.model_parallel.members
        [kind], [again] = kinds, recomputes
        layout = Layout(members, kind if members > 1 else WHOLE, again)
        costs = model_costs(model, (), optimizers, None)
        [alone] = predicted_terms(costs, [1], (), [False])
        return chosen.settle([LayoutTerms(layout, 1.0, alone.fixed_bytes / members)], memory, whole_seconds=1.0)
    names = list(blocks) if blocks is not None else blocks_of(model)
    costs = model_costs(model, names, optimizers, example)
    room = math.inf if memory is None else memory
    terms = predicted_terms(costs, chosen.sizes, kinds, recomputes, memory=room, **pipeline)
    return chosen.settle(terms, memory, whole_seconds=costs.seconds)
