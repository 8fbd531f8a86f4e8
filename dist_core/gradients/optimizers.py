"""Knowledge of torch's optimizers beyond ``step``: parameters, closures, and how their state is put back."""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap
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
    """``load_state_dict`` that keeps the type of every number.

    torch casts state to its parameter's type. An optimizer that keeps float32 weights of bfloat16 parameters would
    lose what it keeps them for.
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
