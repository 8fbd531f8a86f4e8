"""What is known of torch's optimizers beyond ``step``: their parameters, closures, and how their state is put back."""

from __future__ import annotations

import inspect
from typing import Any

import torch


def parameters_of(optimizer: torch.optim.Optimizer) -> list[torch.nn.Parameter]:
    """In the optimizer's order."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def asks_its_closure_again(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a step has to evaluate the loss itself, as LBFGS does: then it cannot be stepped without a closure."""
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    required = closure is not None and closure.default is inspect.Parameter.empty
    return required or isinstance(optimizer, torch.optim.LBFGS)


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
