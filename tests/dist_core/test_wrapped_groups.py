"""Groups of parameters that a script adds to its optimizer in an epoch, and that a resumed trial has to have."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from dist_core.errors import InvalidTraining
from dist_core.gradients.wrapped_state import WrappedState


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
