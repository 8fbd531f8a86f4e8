"""Training loops as people write them that more than one file tries, and the list of all."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn
from torch.optim import lr_scheduler as lr
from torch.utils.data import Dataset

from dist_core import Accumulator
from tests.support.habits import (
    Habit,
    Kit,
    examples,
    network,
    weights_of,
)

mse = nn.functional.mse_loss

HABITS: list[Habit] = []


def habit(function: Habit) -> Habit:
    HABITS.append(function)
    return function


def simple(
    kit: Kit,
    step: Callable[..., Any],
    *,
    norm: bool = False,
    model: nn.Module | None = None,
    data: Dataset[Any] | None = None,
    **options: Any,
) -> list[float]:
    """Three epochs; ``step(model, optimizer, x, y)`` is the body of the loop."""
    model = model or network(norm=norm)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    loader = kit.loader(examples() if data is None else data)
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


@habit
def a_plateau_on_the_summed_metric(kit: Kit) -> list[float]:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = lr.ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=0.5)
    loader, valid = kit.loader(examples()), kit.loader(examples(60), 10)
    wrapped = kit.wrap(model, optimizer, schedule)
    for _ in kit.epochs(4):
        wrapped.train()
        for x, y in loader:
            optimizer.zero_grad()
            mse(wrapped(x), y).backward()
            optimizer.step()
        wrapped.eval()
        totals = Accumulator() if kit.elastic else Plain()
        with torch.no_grad():
            for x, y in valid:
                totals["loss"] += mse(wrapped(x), y, reduction="sum").item()
                totals["count"] += len(x)
        with totals.synchronized():
            assert totals["count"] in (60, 50, 40), "a replica that is lost takes what it has seen with it"
            schedule.step(totals["loss"] / totals["count"])
    assert optimizer.param_groups[0]["lr"] < 0.1
    return weights_of(model)


class Plain(dict[str, float]):
    def __missing__(self, key: str) -> float:
        return 0.0

    def synchronized(self) -> Any:
        return nullcontext()


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
