"""A child's optimizers and schedules: where the parent stands, with hyperparameters of its own."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import (
    CosineAnnealingLR,
    LambdaLR,
    LinearLR,
    LRScheduler,
    OneCycleLR,
    ReduceLROnPlateau,
    SequentialLR,
    StepLR,
)

from dist_core.errors import InvalidTraining
from dist_core.gradients.wrapped_state import WrappedState
from dist_core.state.states import FunctionState, StateRegistry


def made(
    lr: float, schedule: Callable[[torch.optim.Optimizer], Any] | None = None, *, width: int = 3, **options: float
) -> tuple[torch.nn.Module, torch.optim.Optimizer, Any, WrappedState]:
    module = torch.nn.Linear(width, 1)
    optimizer = torch.optim.AdamW(module.parameters(), lr=lr, **options)  # type: ignore[arg-type]
    schedules = [] if schedule is None else [schedule(optimizer)]
    return module, optimizer, schedules[0] if schedules else None, WrappedState(module, [optimizer], schedules, None)


def train(module: torch.nn.Module, optimizer: torch.optim.Optimizer, schedule: Any, steps: int) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        module(torch.ones(2, 3)).square().sum().backward()
        optimizer.step()
        if isinstance(schedule, ReduceLROnPlateau):
            schedule.step(1.0)
        elif schedule is not None:
            schedule.step()


def test_weights_and_moments_are_the_parents_and_hyperparameters_its_own() -> None:
    module, optimizer, _, parent = made(0.1, weight_decay=0.5)
    train(module, optimizer, None, 4)
    own_module, own, _, child = made(0.02, weight_decay=0.0)
    child.inherit(parent.state_dict())
    assert torch.equal(own_module.weight, module.weight)  # type: ignore[arg-type]
    moments = [next(iter(each.state.values())) for each in (optimizer, own)]
    assert torch.equal(moments[0]["exp_avg"], moments[1]["exp_avg"])
    assert moments[0]["step"] == moments[1]["step"] == 4
    assert (own.param_groups[0]["lr"], own.param_groups[0]["weight_decay"]) == (0.02, 0.0)


class Around(torch.optim.Optimizer):
    """Holds another optimizer's groups, as SAM and Lookahead do, and passes on what it loads."""

    def __init__(self, base: torch.optim.Optimizer) -> None:
        super().__init__(base.param_groups, base.defaults)
        self.base = base
        self.param_groups = base.param_groups

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.base.param_groups = self.param_groups


@pytest.mark.parametrize("of_both", [False, True])
def test_whoever_holds_an_optimizers_groups_holds_them_still(of_both: bool) -> None:
    module, optimizer, _, before = made(0.1)
    train(module, optimizer, None, 2)
    around = Around(optimizer)
    groups, state = around.param_groups, optimizer.state
    both = WrappedState(module, [optimizer, around] if of_both else [optimizer], [], None)
    if of_both:
        before = WrappedState(module, [optimizer, Around(optimizer)], [], None)
    both.load_state_dict(before.state_dict())
    for group in groups:
        group["lr"] = 0.5
    assert optimizer.param_groups[0]["lr"] == around.param_groups[0]["lr"] == 0.5
    assert optimizer.state is state and len(state) == 2


SCHEDULES: dict[str, Callable[[torch.optim.Optimizer], LRScheduler]] = {
    "cosine": lambda optimizer: CosineAnnealingLR(optimizer, 20),
    "step": lambda optimizer: StepLR(optimizer, 3, gamma=0.5),
    "lambda": lambda optimizer: LambdaLR(optimizer, lambda step: 1.0 / (1 + step)),
    "one cycle": lambda optimizer: OneCycleLR(optimizer, max_lr=optimizer.param_groups[0]["lr"], total_steps=30),
    "sequence": lambda optimizer: SequentialLR(optimizer, [LinearLR(optimizer), StepLR(optimizer, 2)], milestones=[4]),
}


@pytest.mark.parametrize("name", list(SCHEDULES))
def test_a_schedule_goes_on_where_the_parents_stands_from_a_rate_of_its_own(name: str) -> None:
    """As one that had begun with the child's rate, and had made the parent's steps."""
    module, optimizer, schedule, parent = made(0.1, SCHEDULES[name])
    train(module, optimizer, schedule, 7)
    own_module, own, own_schedule, child = made(0.02, SCHEDULES[name])
    child.inherit(parent.state_dict())
    alone_module, alone, alone_schedule, _ = made(0.02, SCHEDULES[name])
    train(alone_module, alone, alone_schedule, 7)
    for _ in range(5):
        assert own.param_groups[0]["lr"] == pytest.approx(alone.param_groups[0]["lr"])
        train(own_module, own, own_schedule, 1)
        train(alone_module, alone, alone_schedule, 1)


def test_a_schedules_parameters_are_its_own() -> None:
    module, optimizer, schedule, parent = made(0.1, lambda each: ReduceLROnPlateau(each, factor=0.5, patience=2))
    train(module, optimizer, schedule, 2)
    _, _, own_schedule, child = made(0.1, lambda each: ReduceLROnPlateau(each, factor=0.1, patience=9))
    child.inherit(parent.state_dict())
    assert (own_schedule.factor, own_schedule.patience) == (0.1, 9)
    assert own_schedule.num_bad_epochs == schedule.num_bad_epochs == 1


def test_a_schedule_that_is_made_later_takes_the_parents_position() -> None:
    module, optimizer, schedule, parent = made(0.1, SCHEDULES["step"])
    train(module, optimizer, schedule, 4)
    _, own, _, child = made(0.02)
    child.inherit(parent.state_dict())
    later = StepLR(own, 9, gamma=0.9)
    child.schedules.adopt(later)
    assert (later.last_epoch, later.step_size, later.gamma, later.base_lrs) == (4, 9, 0.9, [0.02])


def test_another_shape_is_refused_by_the_name_of_the_tensor() -> None:
    *_, parent = made(0.1)
    *_, child = made(0.1, width=5)
    with pytest.raises(InvalidTraining, match=r"'weight \(1, 5\)' here and 'weight \(1, 3\)' in its parent"):
        child.inherit(parent.state_dict())


def test_states_that_are_registered_later_are_inherited_too() -> None:
    registry = StateRegistry()
    told: list[Any] = []
    registry.restore({"a": {"x": 1}}, inherited=True)
    registry.register("a", FunctionState(dict, lambda state: told.append("loaded"), lambda state: told.append(state)))
    assert told == [{"x": 1}]


# --------- groups of parameters that a script adds to its optimizer in an epoch, and that a resumed trial has to have


def begun() -> tuple[nn.Sequential, torch.optim.SGD, WrappedState]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    optimizer = torch.optim.SGD(model[1].parameters(), lr=0.1, momentum=0.9)
    return model, optimizer, WrappedState(model, [optimizer], [], None)


def trained(model: nn.Module, optimizer: torch.optim.Optimizer) -> torch.Tensor:
    model(torch.ones(3, 2)).sum().backward()
    optimizer.step()
    return torch.cat([each.detach().flatten() for each in model.parameters()])


@pytest.mark.parametrize("named", [False, True])
def test_they_are_added_where_the_trial_goes_on_and_not_twice(named: bool) -> None:
    model, optimizer, state = begun()
    optimizer.add_param_group({"params": model[0].parameters(), "lr": 0.05})
    trained(model, optimizer)
    saved = copy.deepcopy(state.state_dict())
    again, optimizer_again, state_again = begun()
    state_again.load_state_dict(saved)
    # Within the epoch, the script's own line runs once more.
    optimizer_again.add_param_group({"params": again[0].named_parameters() if named else again[0].parameters()})
    assert [group["lr"] for group in optimizer_again.param_groups] == [0.1, 0.05]
    model.zero_grad()
    torch.testing.assert_close(trained(again, optimizer_again), trained(model, optimizer))
    other = nn.Linear(2, 1)
    optimizer_again.add_param_group({"params": other.weight})
    assert len(optimizer_again.param_groups) == 3


def test_groups_of_another_model_are_refused_by_what_to_do() -> None:
    _, optimizer, state = begun()
    optimizer.add_param_group({"params": nn.Linear(2, 1).parameters()})
    _, _, state_again = begun()
    with pytest.raises(InvalidTraining, match="SGD has 1 groups of parameters here and 2 in the trial"):
        state_again.load_state_dict(state.state_dict())
