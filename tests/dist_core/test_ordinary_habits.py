"""Training code as people write it ends with the weights of plain PyTorch, or is refused by name.

Each habit trains in plain PyTorch and as an elastic trial; see tests/support/habits.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.habits import (
    RESCALED,
    WORLDS,
    Habit,
    Kit,
    Numbered,
    as_trial,
    examples,
    in_plain_pytorch,
    network,
    weights_of,
)

mse = nn.functional.mse_loss
Runs = [*((world, passes) for world in WORLDS for passes in (1, 3)), (RESCALED, 1), (RESCALED, 2)]

HABITS: list[Habit] = []


def habit(function: Habit) -> Habit:
    HABITS.append(function)
    return function


def simple(kit: Kit, step: Callable[..., Any], *, norm: bool = False, **options: Any) -> list[float]:
    """Three epochs; ``step(model, optimizer, x, y)`` is the body of the loop."""
    model = network(norm=norm)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    loader = kit.loader(examples())
    wrapped = kit.wrap(model, optimizer, **options)
    for _ in kit.epochs(3):
        for x, y in loader:
            step(wrapped, optimizer, x, y)
    return weights_of(model)


@habit
def the_textbook(kit: Kit) -> list[float]:
    def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor, y: torch.Tensor) -> None:
        optimizer.zero_grad()
        mse(model(x), y).backward()
        optimizer.step()

    return simple(kit, step)


@habit
def a_closure(kit: Kit) -> list[float]:
    """As Lightning calls every optimizer; it also reads the loss that comes back."""
    losses = []

    def step(model: nn.Module, optimizer: Any, x: torch.Tensor, y: torch.Tensor) -> None:
        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = mse(model(x), y)
            loss.backward()
            return loss

        losses.append(optimizer.step(closure).item())

    return simple(kit, step)


@habit
def a_closure_by_name(kit: Kit) -> list[float]:
    def step(model: nn.Module, optimizer: Any, x: torch.Tensor, y: torch.Tensor) -> None:
        def closure() -> float:
            optimizer.zero_grad()
            loss = mse(model(x), y)
            loss.backward()
            return loss.item()

        assert isinstance(optimizer.step(closure=closure), float)

    return simple(kit, step)


@habit
def evaluation_mode_all_along(kit: Kit) -> list[float]:
    """Frozen statistics of batch norms: the whole model is in evaluation mode while it is trained."""
    model = network(norm=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = kit.loader(examples())
    wrapped = kit.wrap(model, optimizer)
    for _ in kit.epochs(3):
        wrapped.eval()
        for x, y in loader:
            optimizer.zero_grad()
            mse(wrapped(x), y).backward()
            optimizer.step()
    return weights_of(model)


@habit
def a_forgotten_train(kit: Kit) -> list[float]:
    """After the first validation, which takes no care of gradients either, the model stays in evaluation mode."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader, valid = kit.loader(examples()), kit.loader(examples(50), 10)
    wrapped = kit.wrap(model, optimizer)
    for _ in kit.epochs(3):
        for x, y in loader:
            optimizer.zero_grad()
            mse(wrapped(x), y).backward()
            optimizer.step()
        wrapped.eval()
        for x, y in valid:
            mse(wrapped(x), y).detach().item()
    return weights_of(model)


@habit
def leaving_early(kit: Kit) -> list[float]:
    """Each epoch goes without its last batch, and the next one begins at the top of the data."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = kit.loader(Numbered(examples()))
    wrapped = kit.wrap(model, optimizer)
    for _ in kit.epochs(4):
        for numbers, (x, y) in loader:
            optimizer.zero_grad()
            mse(wrapped(x), y).backward()
            optimizer.step()
            if numbers.max() >= 48 and is_whole(wrapped):
                break
    return weights_of(model)


def is_whole(model: Any) -> bool:
    """Whether the batch was a step's last one: a loop that counts by itself cannot know of earlier ones."""
    return getattr(model, "is_last_micro_batch", True)


@habit
def a_look_at_the_data(kit: Kit) -> list[float]:
    """One batch is looked at before each epoch's training, for its shape."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = kit.loader(examples())
    wrapped = kit.wrap(model, optimizer)
    for _ in kit.epochs(3):
        x, _y = next(iter(loader))
        assert x.shape[1] == 6
        for x, y in loader:
            optimizer.zero_grad()
            mse(wrapped(x), y).backward()
            optimizer.step()
    return weights_of(model)


@habit
def two_optimizers_for_one_model(kit: Kit) -> list[float]:
    model = network()
    named = dict(model.named_parameters())
    first = torch.optim.SGD([named["0.weight"], named["3.weight"]], lr=0.1, momentum=0.9)
    second = torch.optim.AdamW([named["0.bias"], named["3.bias"]], lr=0.01)
    schedules = [torch.optim.lr_scheduler.StepLR(each, 2, 0.5) for each in (first, second)]
    loader = kit.loader(examples())
    wrapped = kit.wrap(model, [first, second], schedules)
    for _ in kit.epochs(3):
        for x, y in loader:
            first.zero_grad()
            second.zero_grad()
            mse(wrapped(x), y).backward()
            first.step()
            second.step()
            for each in schedules:
                each.step()
    return weights_of(model)


@habit
def two_models_in_turns(kit: Kit) -> list[float]:
    """As a GAN trains: one model's step, then the other's through the first."""
    critic, maker = network(seed=1), nn.Linear(6, 6)
    of_critic = torch.optim.Adam(critic.parameters(), lr=0.01)
    of_maker = torch.optim.SGD(maker.parameters(), lr=0.05, momentum=0.5)
    loader = kit.loader(examples())
    wrapped_critic, wrapped_maker = kit.wrap(critic, of_critic), kit.wrap(maker, of_maker)
    for _ in kit.epochs(3):
        for x, y in loader:
            of_critic.zero_grad()
            (mse(wrapped_critic(x), y) + wrapped_critic(wrapped_maker(x).detach()).square().mean()).backward()
            of_critic.step()
            of_maker.zero_grad()
            mse(wrapped_critic(wrapped_maker(x)), y).backward()
            of_maker.step()
    return weights_of(critic, maker)


IN_TURNS = "computes with a model after an optimizer has stepped"


@pytest.mark.parametrize(("replicas", "passes"), Runs)
@pytest.mark.parametrize("trains", HABITS, ids=lambda each: each.__name__)
def test_a_habit_trains_as_in_plain_pytorch(trains: Habit, replicas: int, passes: int) -> None:
    expected = in_plain_pytorch(trains)
    if trains is two_models_in_turns and passes > 1:
        with pytest.raises(AssertionError, match=IN_TURNS):
            as_trial(trains, replicas, passes)
        return
    ends = as_trial(trains, replicas, passes)
    survivors = [weights for weights in ends if weights is not None]
    assert len(survivors) == (2 if replicas == RESCALED else replicas)
    for weights in survivors:
        assert weights == pytest.approx(expected, abs=1e-5)
