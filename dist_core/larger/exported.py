"""Stages from a traced model (torch.export): whatever goes from block to block goes from stage to stage.

Cutting a copy of the model sends each block's first argument on. Where a block needs more than that, such as a mask
that the model's own code makes, the trace knows. What it does not know is that code may do something else next time:
models whose evaluation differs from their training, or that depend on a batch's size, are refused.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.pipelining import SplitPoint, pipeline

from dist_core.errors import InvalidTraining
from dist_core.larger.alike import difference_between
from dist_core.larger.stages import arguments_of
from dist_core.partition.balance import Partition


def exported_modules(model: nn.Module, found: Partition, example: Any, indices: Sequence[int]) -> list[nn.Module]:
    """The stages of those numbers, with the model's own parameters, under their own names.

    ``example``: a microbatch. Raises InvalidTraining for a model that cannot be traced, or not be cut there.
    """
    arguments = arguments_of(example)
    firsts = {stage.blocks[0].name: SplitPoint.BEGINNING for stage in found.stages[1:]}
    try:
        with warnings.catch_warnings():
            # Of torch's own, about its own.
            warnings.simplefilter("ignore")
            pipe = pipeline(model, arguments, split_spec=firsts)
    except Exception as error:
        raise InvalidTraining(
            f"{type(model).__name__} cannot be traced with torch.export: {type(error).__name__}: {error!s:.300}. Leave "
            "out split='export', or mend what it names"
        ) from error
    if pipe.num_stages != len(found.stages):
        raise InvalidTraining(
            f"the traced model has {pipe.num_stages} stages and not {len(found.stages)}: its code does not call its "
            "blocks one after another"
        )
    stages = _connected(pipe, arguments)
    for stage in stages:
        _refuse_what_evaluates_otherwise(model, stage)
    _refuse_what_computes_otherwise(model, stages, arguments)
    return [stages[index] for index in indices]


class TracedStage(nn.Module):
    """Computes its part of the trace, and hands on what it was given for later stages.

    What it is given and what it gives are the values that are alive there, in one order. Those that are no numbers with
    a fraction, masks and indices, travel as such: stages send gradients back for all that they were sent.
    """

    def __init__(
        self, part: nn.Module, takes: Sequence[torch.dtype], uses: Sequence[int], gives: Sequence[tuple[bool, int]]
    ) -> None:
        """``uses``: which of what it takes its part is called with. ``gives``: (whether its part makes it, which)."""
        super().__init__()
        self.part = part
        self._takes = takes
        self._uses = uses
        self._gives = gives

    def forward(self, *values: torch.Tensor) -> Any:
        sent = [_sent(each) for each in self.given(values)]
        return sent[0] if len(sent) == 1 else tuple(sent)

    def given(self, values: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Before it is made to travel."""
        made = self.part(*(_received(values[index], self._takes[index]) for index in self._uses))
        made = made if isinstance(made, (tuple, list)) else (made,)
        return [made[which] if is_made else values[which] for is_made, which in self._gives]


def _sent(value: torch.Tensor) -> torch.Tensor:
    if value.is_complex():
        return torch.view_as_real(value)
    return value if value.is_floating_point() else value.to(torch.float64)


def _received(value: torch.Tensor, kind: torch.dtype) -> torch.Tensor:
    if kind.is_complex and not value.is_complex():
        return torch.view_as_complex(value.contiguous())
    return value.to(kind)


def _connected(pipe: Any, arguments: tuple[Any, ...]) -> list[TracedStage]:
    graph: torch.fx.Graph = pipe.split_gm.graph
    calls = [node for node in graph.nodes if node.op == "call_module"]
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    [end] = [node for node in graph.nodes if node.op == "output"]
    last_use: dict[torch.fx.Node, int] = {}
    for index, call in enumerate(calls):
        for each in call.all_input_nodes:
            last_use[each] = index
    for each in end.all_input_nodes:
        last_use[each] = len(calls)
    alive, values = inputs, arguments
    found = []
    for index, call in enumerate(calls):
        made = {node: int(node.args[1]) for node in call.users if "getitem" in str(node.target)} or {call: 0}
        living = [node for node in (*alive, *made) if last_use.get(node, -1) > index]
        stage = TracedStage(
            pipe.get_stage_module(index),
            [each.dtype for each in values],
            [alive.index(node) for node in call.all_input_nodes],
            [(True, made[node]) if node in made else (False, alive.index(node)) for node in living],
        )
        with torch.no_grad():
            values = tuple(stage.given(values))
        alive = living
        found.append(stage)
    return found


def _refuse_what_evaluates_otherwise(model: nn.Module, module: nn.Module) -> None:
    for node in _nodes(module):
        name = str(node.target)
        drops = "dropout" in name and len(node.args) > 1 and node.args[1] != 0.0
        if drops or "batch_norm" in name:
            what = "dropout" if drops else "batch norm"
            raise InvalidTraining(
                f"{type(model).__name__} computes otherwise when it is evaluated ({what}), which a "
                "traced model does not know; leave out split='export'"
            )


def _nodes(module: nn.Module) -> Iterator[torch.fx.Node]:
    for each in module.modules():
        graph = getattr(each, "graph", None)
        if isinstance(graph, torch.fx.Graph):
            yield from graph.nodes


def _refuse_what_computes_otherwise(model: nn.Module, modules: Sequence[nn.Module], arguments: tuple[Any, ...]) -> None:
    """Whether it is trained or evaluated must make no difference, nor the size of a microbatch."""
    for trains in (True, False):
        difference = difference_between(model, modules, arguments, trains=trains)
        if difference is not None:
            raise InvalidTraining(
                f"the trace of {type(model).__name__} does not compute what the model does when it is "
                f"{'trained' if trains else 'evaluated'} ({difference}); a trace knows one way of computing only. "
                "Leave out split='export', or write the model's code alike for both"
            )
    twice = tuple(torch.cat([each, each]) if isinstance(each, torch.Tensor) else each for each in arguments)
    difference = difference_between(model, modules, twice, trains=model.training)
    if difference is not None:
        raise InvalidTraining(
            f"{type(model).__name__}, traced with {len(arguments[0])} examples, does not compute the same for twice as "
            f"many ({difference}); write its code without a batch's size in it, or leave out split='export'"
        )
