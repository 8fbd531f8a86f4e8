"""Cuts of a model for a pipeline, and the stages that this process holds."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from dist_core.errors import InvalidTraining
from dist_core.partition.balance import Partition, PipelineTerms, partition, partition_at
from dist_core.partition.blocks import BlockCosts, StageDevice
from dist_core.partition.measure import DeviceProfile, ties_between

ANY_DEVICE = DeviceProfile(flops_per_second=1e12, bytes_per_second=1e11)
"""Only how blocks compare with each other matters: every process has to find the same cuts, so none is measured."""


def blocks_of(model: nn.Module) -> list[str]:
    """Return the blocks that a model can be cut between: its children, or the entries of a child that is a list."""
    if isinstance(model, nn.Sequential):
        return [name for name, _ in model.named_children()]
    names: list[str] = []
    for name, child in model.named_children():
        if isinstance(child, (nn.ModuleList, nn.Sequential)):
            names += [f"{name}.{index}" for index, _ in child.named_children()]
        elif any(True for _ in child.parameters()):
            names.append(name)
    return names


def cut(
    model: nn.Module,
    names: Sequence[str],
    num_stages: int,
    terms: PipelineTerms,
    *,
    costs: Sequence[BlockCosts] | None,
    cuts: Sequence[str] | None,
    memory_bytes: float,
) -> Partition:
    """Return the model's stages, the same on every process that asks.

    Raises InvalidTraining for what cannot be cut. ``costs``: of the blocks, where they are known; ``cuts``: names of
    blocks that stages begin with, where these are. ``memory_bytes``: of the device of each stage.
    """
    _refuse_what_lies_between(model, names)
    devices = [StageDevice(name=f"stage {index}", memory_bytes=memory_bytes) for index in range(num_stages)]
    if cuts is not None:
        unknown = [_unknown(name, model.get_submodule(name)) for name in names]
        found = partition_at(unknown, cuts, devices, terms)
        _refuse_shared(found, ties_between(model, names))
        return found
    if costs is None:
        raise InvalidTraining(
            "the cost of the pipeline's blocks is unknown, so it cannot be cut into stages; give example= (a "
            "microbatch of inputs), or cuts= (the names of the blocks that stages begin with)"
        )
    return partition(costs, devices, terms, ties=ties_between(model, names))


def stage_modules(
    model: nn.Module, names: Sequence[str], partition: Partition, indices: Sequence[int]
) -> list[nn.Module]:
    """Return the stages of those numbers, with the model's own parameters: what optimizers know of them stays true."""
    own = {id(each): each for each in [*model.parameters(), *model.buffers()]}
    stages = []
    for index in indices:
        kept = {block.name for block in partition.stages[index].blocks}
        stages.append(without_other_blocks(model, names, kept, memo=dict(own)))
    return stages


def finest(model: nn.Module, names: Sequence[str]) -> Partition:
    """Return as many stages as blocks that share no parameter allow; raise InvalidTraining."""
    _refuse_what_lies_between(model, names)
    place = {name: index for index, name in enumerate(names)}
    ties = [[place[name] for name in tie] for tie in ties_between(model, names)]
    firsts: list[str] = []
    last = -1
    for index, name in enumerate(names):
        if index > last:
            firsts.append(name)
        last = max(last, index, *(max(tie) for tie in ties if index in tie))
    devices = [StageDevice(name=f"stage {index}") for index in range(len(firsts))]
    blocks = [_unknown(name, model.get_submodule(name)) for name in names]
    return partition_at(blocks, firsts[1:], devices, PipelineTerms(microbatches=len(firsts)))


def _unknown(name: str, block: nn.Module) -> BlockCosts:
    size = sum(each.nbytes for each in block.parameters())
    return BlockCosts(name=name, forward_seconds=1.0, backward_seconds=2.0, parameter_bytes=size)


def arguments_of(inputs: Any) -> tuple[Any, ...]:
    """Return the model's arguments: a tuple is all of them, anything else the only one."""
    return inputs if isinstance(inputs, tuple) else (inputs,)


def examples_in(example: Any) -> int:
    return max(1, len(arguments_of(example)[0]))


def copied_to_meta(model: nn.Module) -> nn.Module:
    """Copy the model without its numbers, which are not copied on the way."""
    memo: dict[int, Any] = {}
    for each in model.parameters():
        memo[id(each)] = nn.Parameter(torch.empty_like(each, device="meta"), requires_grad=each.requires_grad)
    for buffer in model.buffers():
        memo[id(buffer)] = torch.empty_like(buffer, device="meta")
    return copy.deepcopy(model, memo)


def on_meta(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to("meta")
    return tuple(map(on_meta, value)) if isinstance(value, tuple) else value


def _refuse_what_lies_between(model: nn.Module, names: Sequence[str]) -> None:
    outside = [
        name
        for name, _ in model.named_parameters()
        if not any(name == block or name.startswith(f"{block}.") for block in names)
    ]
    if outside:
        raise InvalidTraining(
            f"the parameter {outside[0]!r} belongs to no block, so every stage would have its own copy; also name "
            "the module that contains it as a block"
        )


def _refuse_shared(found: Partition, ties: Sequence[Sequence[str]]) -> None:
    stage_of = {block.name: index for index, stage in enumerate(found.stages) for block in stage.blocks}
    for tie in ties:
        if len({stage_of[name] for name in tie}) > 1:
            raise InvalidTraining(
                f"the blocks {', '.join(tie)} share a parameter but are in different stages; cut elsewhere, so that "
                "one stage has them all"
            )


def train_in_place_of(
    optimizers: Sequence[torch.optim.Optimizer], replaced: Mapping[int, torch.nn.Parameter | None]
) -> None:
    """Let optimizers train other parameters than they were made for, or none in their place.

    ``replaced``: by the identity of each parameter of the whole model. Raises InvalidTraining where one has stepped.
    """
    for optimizer in optimizers:
        if optimizer.state:
            raise InvalidTraining(
                f"{type(optimizer).__name__} took a step before its model was divided; create the model and the "
                "optimizer, wrap them, and then train"
            )
        for group in optimizer.param_groups:
            found = [replaced.get(id(each), each) for each in group["params"]]
            group["params"] = [each for each in found if each is not None]


def recompute_in(model: nn.Module, names: Sequence[str]) -> None:
    """Recompute activations in those of the blocks that the model has, with the same random numbers again.

    Not in those with a batch norm, which would count the batch twice.
    """
    present = dict(model.named_modules())
    for name in names:
        block = present.get(name)
        if block is None or not any(True for _ in block.parameters()):
            continue
        if not any(isinstance(each, nn.modules.batchnorm._BatchNorm) for each in block.modules()):
            block.forward = functools.partial(_recomputed, block.forward)


def _recomputed(forward: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    if not torch.is_grad_enabled():
        return forward(*arguments, **named)
    return checkpoint(forward, *arguments, use_reentrant=False, **named)


# ---------------------------------------------------------------------- the part of a model that a stage is


class HandsOn(nn.Module):
    """Placeholder for a block of another stage."""

    def forward(self, first: Any, *_: Any, **__: Any) -> Any:
        return first


def without_other_blocks(
    model: nn.Module, names: Sequence[str], kept: Collection[str], *, memo: dict[int, Any] | None = None
) -> nn.Module:
    """Return a copy of the model with ``kept`` of the blocks ``names``; what is no block is in every stage.

    ``memo``: what is not to be copied but to be the same here and there, by its identity, as for ``copy.deepcopy``.
    """
    unknown = sorted(set(kept) - set(names))
    if unknown:
        raise InvalidTraining(f"{unknown[0]!r} is not a block of this model; its blocks are {', '.join(names)}")
    stage = copy.deepcopy(model, memo)
    for name in names:
        if name not in kept:
            path, _, last = name.rpartition(".")
            holder = stage.get_submodule(path)
            if isinstance(holder, (nn.ModuleList, nn.ModuleDict, nn.Sequential)):
                # By its key: what stays is not numbered anew.
                del holder._modules[last]
            else:
                setattr(holder, last, HandsOn())
    return stage


def stages_of(model: nn.Module, names: Sequence[str], found: Partition) -> list[nn.Module]:
    """Return a model for each stage; the output of one is the input of the next."""
    return [without_other_blocks(model, names, {block.name for block in stage.blocks}) for stage in found.stages]
