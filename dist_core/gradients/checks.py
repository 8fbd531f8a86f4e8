"""Checks that refuse what would be trained wrongly."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from dist_core.device import Device
from dist_core.errors import InvalidTraining
from dist_core.generations.group_needs import carrier_for
from dist_core.gradients.optimizers import asks_its_closure_again, parameters_of, schedules_unknown
from dist_core.gradients.patched_calls import models_of
from dist_core.gradients.reduce import ReductionStrategy


def refuse_what_cannot_be_trained(
    model: torch.nn.Module, optimizers: Sequence[torch.optim.Optimizer], options: Mapping[str, Any]
) -> None:
    """Refuse, at wrapping, a model that cannot be trained. ``options`` are those for torch's own wrapper."""
    if not optimizers:
        raise InvalidTraining(f"{type(model).__name__} was wrapped without an optimizer; give at least one")
    for optimizer in optimizers:
        if asks_its_closure_again(optimizer):
            raise InvalidTraining(
                f"{type(optimizer).__name__} needs a closure, which it may evaluate several times in one step, and all "
                "replicas would have to agree on each evaluation; this is not supported. Choose an optimizer that "
                "takes one gradient per step"
            )
    if not any(parameter.requires_grad for parameter in model.parameters()):
        name = model._get_name()  # type: ignore[no-untyped-call]  # not annotated in torch
        raise InvalidTraining(f"{name} has no parameter that requires a gradient; there is nothing to train")
    for name in ("process_group", "device_mesh", "init_sync", "forward_sync_buffers", "broadcast_buffers"):
        if name in options:
            raise InvalidTraining(
                f"AdaptiveDataParallel was given {name}=; it makes process groups and sends weights and buffers to "
                "other replicas itself, because the set of replicas changes. Leave it out"
            )


def refuse_what_needs_the_host(model: torch.nn.Module, device: Device, reductions: Sequence[ReductionStrategy]) -> None:
    """Refuse, for a model on a GPU, reductions that work in the host's memory or on buckets that stay in place."""
    if device.is_host:
        return
    names = {each.name for each in reductions}
    if "power_sgd" in names and carrier_for(device) == "staged":
        raise InvalidTraining(
            "power_sgd runs on the GPU that holds the gradients, but replicas that share a GPU reduce gradients in "
            "host memory; choose another reduction, or give each replica a GPU of its own"
        )
    for name, module in model.named_modules():
        if isinstance(module, (torch.nn.Embedding, torch.nn.EmbeddingBag)) and module.sparse:
            raise InvalidTraining(
                f"{name or type(module).__name__} has sparse gradients, which can only be reduced on CPUs; leave out "
                "sparse=True"
            )


def refuse_what_is_missing(
    model: torch.nn.Module, optimizers: Sequence[torch.optim.Optimizer], warn: Callable[[str], None]
) -> None:
    """Refuse, once all is made, an optimizer whose weights are in no model, and schedules of no known kind."""
    for optimizer in optimizers:
        wrapped = {id(each) for other in models_of(optimizer) for each in other.module.parameters()}
        strange = [each for each in parameters_of(optimizer) if each.requires_grad and id(each) not in wrapped]
        if strange:
            raise InvalidTraining(
                f"{type(optimizer).__name__} trains {len(strange)} parameters that belong to no wrapped model (the "
                f"first has shape {tuple(strange[0].shape)}): their gradients would not be reduced, and checkpoints "
                "would not contain them. Put them into the model, or also wrap their module with the same optimizer"
            )
        given = [each for other in models_of(optimizer) for each in other.schedules]
        for schedule in schedules_unknown(optimizer, given):
            raise InvalidTraining(
                f"{type(schedule).__name__} sets the learning rate of {type(optimizer).__name__} but was not given "
                "to the model's wrapper: it would start again when the trial resumes or a replica joins, and "
                "advance in every pass of a step. Give the wrapper all schedules: AdaptiveDataParallel(model, "
                "optimizer, [first, second])"
            )
    trained = {id(each) for optimizer in optimizers for each in parameters_of(optimizer)}
    idle = [name for name, each in model.named_parameters() if each.requires_grad and id(each) not in trained]
    if idle:
        warn(
            f"{len(idle)} parameters of {type(model).__name__} require a gradient but are in none of its optimizers, "
            f"so they are not trained (the first is {idle[0]!r}). Give all optimizers as a list, or set "
            "requires_grad to False"
        )


def trained_weights(model: torch.nn.Module) -> frozenset[int]:
    """Return the identities of the weights that require a gradient."""
    return frozenset(id(each) for each in model.parameters() if each.requires_grad)


def refuse_weights_changed_within_step(model: torch.nn.Module, trained: frozenset[int]) -> None:
    """Refuse weights that are frozen or unfrozen between two of a step's backward passes: their buckets are in use."""
    named = {id(each): name for name, each in model.named_parameters(remove_duplicate=False)}
    changed = min(named.get(each, "a replaced one") for each in trained ^ trained_weights(model))
    raise InvalidTraining(
        f"the weight {changed!r} of {type(model).__name__} was frozen or unfrozen within a step, after gradients of "
        "that step were summed over the replicas. Freeze and unfreeze weights between steps, or wrap the parts that "
        "train in turns as separate models"
    )


def refuse_unreduced(model: torch.nn.Module, whole: str) -> None:
    """Refuse an update from a part of a step's gradients; ``whole``: the replicas or passes that make all of them."""
    trained = {name: each for name, each in model.named_parameters() if each.requires_grad}
    if any(each.grad is not None and bool(each.grad.any()) for each in trained.values()):
        if idle := [name for name, each in trained.items() if each.grad is None]:
            raise InvalidTraining(
                f"{len(idle)} weights of {type(model).__name__} have no gradient in this step (the first is "
                f"{idle[0]!r}), so no gradients were summed over the {whole}. If these weights take no "
                "part in the loss, give find_unused_parameters=True, as for DistributedDataParallel. An optimizer "
                "that steps within the backward pass can train one replica only"
            )
        raise InvalidTraining(
            f"an optimizer of {type(model).__name__} steps on gradients that were not reduced over the {whole}: "
            "the forward pass bypassed AdaptiveDataParallel, or ran in evaluation mode outside a training "
            "loop, or the gradients come from torch.autograd.grad(). Call the wrapped model, not the one inside it, "
            "and call backward() within a loop over an AdaptiveDataLoader"
        )
