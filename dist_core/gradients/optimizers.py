"""Knowledge of torch's optimizers and schedules beyond ``step``: parameters, closures, states, positions."""

from __future__ import annotations

import ast
import functools
import gc
import inspect
import textwrap
import types
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
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


def parameters_of(optimizer: torch.optim.Optimizer) -> list[torch.nn.Parameter]:
    """Return the parameters in the optimizer's order."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def asks_its_closure_again(optimizer: torch.optim.Optimizer) -> bool:
    """Tell whether a step evaluates the loss itself, as LBFGS does, and so needs a closure."""
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    required = closure is not None and closure.default is inspect.Parameter.empty
    return required or isinstance(optimizer, torch.optim.LBFGS)


@functools.cache
def keeps_its_closure(kind: type[torch.optim.Optimizer]) -> bool:
    """Return whether a step does more with a closure than evaluate it once, as SAM does: it climbs and asks again."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(kind.step)))
    except (OSError, TypeError, SyntaxError):
        return False
    calls = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "closure"
    ]
    called = {id(node.func) for node in calls}
    asked = {id(node.left) for node in ast.walk(tree) if isinstance(node, ast.Compare)}
    tested = {id(node.test) for node in ast.walk(tree) if isinstance(node, (ast.If, ast.IfExp))}
    asserted = any(isinstance(node, ast.Assert) and "closure" in ast.unparse(node.test) for node in ast.walk(tree))
    others = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Name) and node.id == "closure" and id(node) not in called | asked | tested
    ]
    return len(calls) > 1 or bool(others) or asserted


def load_optimizer(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Load an optimizer's state into the objects that hold it, and keep the type of every number.

    Optimizers around this one, and code that sets rates itself, hold its groups: torch would replace them by others. It
    also casts state to its parameter's type, and one that keeps float32 weights of bfloat16 parameters would lose what
    it keeps them for. A library's optimizer around another one may have a state of its own form, which it takes itself.
    """
    if "param_groups" not in state:
        optimizer.load_state_dict(state)
        return
    held, groups, state_held = optimizer.param_groups, list(optimizer.param_groups), optimizer.state
    optimizer.load_state_dict(state)
    for group, loaded in zip(groups, optimizer.param_groups, strict=True):
        group.clear()
        group.update(loaded)
    # Whoever was given the new list meanwhile has the same groups in it.
    optimizer.param_groups[:] = groups
    held[:] = groups
    optimizer.param_groups = held
    loaded_state = dict(optimizer.state)
    state_held.clear()
    state_held.update(loaded_state)
    optimizer.state = state_held
    saved = dict(
        zip(
            (index for group in state["param_groups"] for index in group["params"]),
            parameters_of(optimizer),
            strict=True,
        )
    )
    for index, parameter in saved.items():
        present = optimizer.state.get(parameter, {})
        for name, value in state["state"].get(index, {}).items():
            mine = present.get(name)
            if isinstance(value, torch.Tensor) and isinstance(mine, torch.Tensor) and mine.dtype != value.dtype:
                present[name] = value.to(device=mine.device, copy=True)


def add_group_for_script(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> None:
    """Add a group that the script has added in an epoch, and may add once more where it goes on within that epoch."""
    added = {id(parameter) for parameter in group["params"]}
    add = optimizer.add_param_group
    add(group)

    def add_another(_: Any, another: dict[str, Any]) -> None:
        given = another["params"]
        parameters = [given] if isinstance(given, torch.Tensor) else list(given)
        if {id(each[1] if isinstance(each, tuple) else each) for each in parameters} != added:
            add({**another, "params": parameters})

    optimizer.add_param_group = types.MethodType(  # type: ignore[method-assign]  # this instance only
        add_another, optimizer
    )


def own_groups(optimizer: torch.optim.Optimizer, saved: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return another optimizer's saved groups with this one's hyperparameters.

    A hyperparameter is what the optimizer's class is constructed with, and what a schedule has added. A group's other
    entries, such as counters, are state.
    """
    constructed = inspect.signature(type(optimizer)).parameters
    groups = []
    for own_group, theirs in zip(optimizer.param_groups, saved, strict=True):
        own = {
            name: value
            for name, value in own_group.items()
            if name != "params" and (name in constructed or name not in optimizer.defaults)
        }
        if theirs.get("initial_lr"):
            # A schedule that is made later finds where it would have begun.
            own["initial_lr"] = own_group.get("initial_lr", own_group["lr"])
            own["lr"] = own["initial_lr"] * (theirs["lr"] / theirs["initial_lr"])
        groups.append({**theirs, **own})
    return groups


def own_schedules(schedules: Sequence[Any], saved: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the positions of other schedules with these ones' parameters; those beyond these stay as they are."""
    pairs = zip(schedules, saved, strict=False)
    return [*(_own_schedule(each, theirs) for each, theirs in pairs), *saved[len(schedules) :]]


def _own_schedule(schedule: Any, state: dict[str, Any]) -> dict[str, Any]:
    mine = schedule.state_dict()
    constructed = {*inspect.signature(type(schedule)).parameters, "base_lrs"} - {"last_epoch"}
    merged = {**state, **{name: value for name, value in mine.items() if name in constructed}}
    if "_schedulers" in state:
        merged["_schedulers"] = own_schedules(schedule._schedulers, state["_schedulers"])
    return merged


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


def schedules_unknown(optimizer: Optimizer, listed: Iterable[Any]) -> list[LRScheduler]:
    """Schedules that set this optimizer's rates, and are neither known nor a part of one that is.

    Found by who holds on to the optimizer: some milliseconds, for once.
    """
    expected = {id(each) for schedule in listed for each in _with_parts(schedule)}
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
