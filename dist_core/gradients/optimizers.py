"""Knowledge of torch's optimizers beyond ``step``: parameters, closures, and how their state is put back."""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap
from collections.abc import Sequence
from typing import Any

import torch


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
    """Load an optimizer's state and keep the type of every number.

    torch casts state to its parameter's type. An optimizer that keeps float32 weights of bfloat16 parameters would lose
    what it keeps them for.
    """
    optimizer.load_state_dict(state)
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
