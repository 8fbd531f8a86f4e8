"""Training code as people write it ends with the weights of plain PyTorch, or is refused by name.

Each habit trains in plain PyTorch and as an elastic trial; see tests/support/habits.py.
"""

from __future__ import annotations

import random
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import lr_scheduler as lr

import dist_core
import dist_core.generations.watch
import dist_core.trial.core
from dist_core import Accumulator
from dist_core.state.states import FunctionState
from tests.support.habits import (
    FROZEN,
    FROZEN_SECONDS,
    LATE_IN_AN_EVALUATION,
    PAIR,
    RESCALED,
    WORLDS,
    Habit,
    Kit,
    Numbered,
    as_trial,
    examples,
    in_plain_pytorch,
    network,
    told_by_one_replica,
    weights_of,
    with_a_leaver,
    with_a_loss,
)

mse = nn.functional.mse_loss
USUAL = [(1, 1), (2, 3), (RESCALED, 2)]
SLOW = sorted({*((world, passes) for world in WORLDS for passes in (1, 3)), (RESCALED, 1)} - set(USUAL))
"""Replicas, and passes a step."""

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
def two_passes_an_epoch(kit: Kit) -> list[float]:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    loader = kit.loader(examples())
    wrapped = kit.wrap(model, optimizer)
    for _ in kit.epochs(2):
        for factor in (1.0, 0.5):
            for x, y in loader:
                optimizer.zero_grad()
                (factor * mse(wrapped(x), y)).backward()
                optimizer.step()
    return weights_of(model)


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
    return bool(getattr(model, "is_last_micro_batch", True))


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


def linear_warm_up(step: int) -> float:
    return min(1.0, (step + 1) / 4)


SCHEDULES: dict[str, Callable[[Any], Any]] = {
    "one_cycle": lambda each: lr.OneCycleLR(each, max_lr=0.2, total_steps=12),
    "warm_restarts": lambda each: lr.CosineAnnealingWarmRestarts(each, 5),
    "sequential": lambda each: lr.SequentialLR(
        each, [lr.LinearLR(each, 0.1, 1.0, 3), lr.CosineAnnealingLR(each, 9)], milestones=[3]
    ),
    "chained": lambda each: lr.ChainedScheduler([lr.ConstantLR(each, 0.5, 4), lr.ExponentialLR(each, 0.9)], each),
    "lambda": lambda each: lr.LambdaLR(each, linear_warm_up),
    "cyclic": lambda each: lr.CyclicLR(each, 0.05, 0.2, step_size_up=3),
    "polynomial": lambda each: lr.PolynomialLR(each, 12),
    "multi_step": lambda each: lr.MultiStepLR(each, [4, 8]),
}


@habit
def schedules_by_step(kit: Kit) -> list[float]:
    """All of them in one run, as parts of one model would have them: each with an optimizer of its own."""
    return many_schedules(kit, by_epoch=False)


@habit
def schedules_by_epoch(kit: Kit) -> list[float]:
    return many_schedules(kit, by_epoch=True)


def many_schedules(kit: Kit, *, by_epoch: bool) -> list[float]:
    torch.manual_seed(0)
    model = nn.ModuleDict({name: nn.Linear(6, 1) for name in SCHEDULES})
    optimizers = [torch.optim.SGD(model[name].parameters(), lr=0.1) for name in SCHEDULES]
    schedules = [make(optimizer) for make, optimizer in zip(SCHEDULES.values(), optimizers, strict=True)]
    loader = kit.loader(examples())
    wrapped = kit.wrap(Sum(model), optimizers, schedules)
    for _ in kit.epochs(3):
        for x, y in loader:
            for optimizer in optimizers:
                optimizer.zero_grad()
            mse(wrapped(x), y).backward()
            for optimizer in optimizers:
                optimizer.step()
            for schedule in schedules if not by_epoch else ():
                schedule.step()
        for schedule in schedules if by_epoch else ():
            schedule.step()
    return [*weights_of(model), *(float(each.param_groups[0]["lr"]) for each in optimizers)]


class Sum(nn.Module):
    def __init__(self, parts: nn.ModuleDict) -> None:
        super().__init__()
        self.parts = parts

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([part(x) for part in self.parts.values()]).mean(dim=0)


@habit
def a_schedule_made_after_the_wrapper(kit: Kit) -> list[float]:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    loader, wrapped = kit.loader(examples()), kit.wrap(model, optimizer)
    schedule = lr.CosineAnnealingLR(optimizer, 12)
    for _ in kit.epochs(3):
        for x, y in loader:
            optimizer.zero_grad()
            mse(wrapped(x), y).backward()
            optimizer.step()
            schedule.step()
    return [*weights_of(model), float(schedule.get_last_lr()[0])]


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
def compiled_inside(kit: Kit) -> list[float]:
    return compiled(kit, inside=True)


@habit
def compiled_outside(kit: Kit) -> list[float]:
    return compiled(kit, inside=False)


def compiled(kit: Kit, *, inside: bool) -> list[float]:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = kit.loader(examples())
    called: Any = torch.compile(model, backend="aot_eager") if inside else model
    wrapped = kit.wrap(called, optimizer)
    called = wrapped if inside else torch.compile(wrapped, backend="aot_eager")
    for _ in kit.epochs(3):
        for x, y in loader:
            optimizer.zero_grad()
            mse(called(x), y).backward()
            optimizer.step()
    return weights_of(model)


@habit
def a_scaler_that_was_not_given(kit: Kit) -> list[float]:
    """fp16-style loss scaling as in torch's own examples."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=5)
    loader = kit.loader(examples())
    wrapped = kit.wrap(model, optimizer)
    for _ in kit.epochs(3):
        for x, y in loader:
            optimizer.zero_grad()
            scaler.scale(mse(wrapped(x), y)).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
    return [*weights_of(model), scaler.get_scale()]


@habit
def in_double_precision(kit: Kit) -> list[float]:
    return of_doubles(kit, torch.optim.SGD)


@habit
def in_double_precision_with_adam(kit: Kit) -> list[float]:
    return of_doubles(kit, torch.optim.AdamW)


def of_doubles(kit: Kit, kind: Any) -> list[float]:
    model = network().double()
    optimizer = kind(model.parameters(), lr=0.02)
    loader = kit.loader(examples())
    wrapped = kit.wrap(model, optimizer)
    for _ in kit.epochs(3):
        for x, y in loader:
            optimizer.zero_grad()
            mse(wrapped(x.double()), y.double()).backward()
            optimizer.step()
    return weights_of(model)


class MasterSGD(torch.optim.SGD):
    """Keeps float32 weights of parameters of half that precision, and steps those."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if "master" not in state:
                    state["master"] = parameter.detach().float().clone()
                state["master"] -= group["lr"] * parameter.grad.float()
                parameter.data.copy_(state["master"])
        return None


@habit
def weights_in_half_precision_with_a_master_copy(kit: Kit) -> list[float]:
    """The gradient is a constant that is exact in bfloat16, so that only the master copy can lose something."""
    model = Slope().bfloat16()
    optimizer = MasterSGD(model.parameters(), lr=2.0**-12)
    loader = kit.loader(examples())
    wrapped = kit.wrap(model, optimizer)
    for _ in kit.epochs(3):
        for x, _y in loader:
            optimizer.zero_grad()
            wrapped(x).mean().backward()
            optimizer.step()
    return [float(optimizer.state[model.weight]["master"]), *weights_of(model)]


class Slope(nn.Module):
    """Its output has the gradient 1 for every example."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * torch.ones(len(x), dtype=self.weight.dtype)


@habit
def a_metric_by_all_reduce(kit: Kit) -> list[float]:
    """As a script for torchrun averages its loss; the rate follows it, so that each replica has to see the same."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader, valid = kit.loader(examples()), kit.loader(examples(60), 10)
    wrapped = kit.wrap(model, optimizer)
    for _ in kit.epochs(3):
        wrapped.train()
        for x, y in loader:
            optimizer.zero_grad()
            mse(wrapped(x), y).backward()
            optimizer.step()
        sums = torch.zeros(2, dtype=torch.float64)
        with torch.no_grad():
            for x, y in valid:
                sums += torch.tensor([mse(wrapped(x), y, reduction="sum").item(), len(x)], dtype=torch.float64)
        if dist.is_initialized():
            dist.all_reduce(sums)
            assert dist.get_world_size() == dist_core.world_size() and dist.get_rank() == dist_core.rank()
            everybody = [torch.zeros(1) for _ in range(dist.get_world_size())]
            dist.all_gather(everybody, torch.tensor([float(dist.get_rank())]))
            assert [int(each) for each in everybody] == list(range(dist.get_world_size()))
            dist.barrier()
        assert sums[1] == 60
        optimizer.param_groups[0]["lr"] = 0.01 * round(10.0 * float(sums[0] / sums[1]), 3)
    return weights_of(model)


IN_TURNS = "computes with a model after an optimizer has stepped"


def habits_and_runs() -> Iterator[Any]:
    for trains in HABITS:
        for replicas, passes in USUAL + SLOW:
            # This one is refused in its first step: nobody is left whom others could join.
            if (trains, replicas) != (two_models_in_turns, RESCALED) or passes == 1:
                name = f"{trains.__name__}-{replicas}-{passes}"
                marks = [pytest.mark.slow] if (replicas, passes) in SLOW else []
                yield pytest.param(trains, replicas, passes, id=name, marks=marks)


@pytest.mark.parametrize(("trains", "replicas", "passes"), list(habits_and_runs()))
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


def one_step(kit: Kit, step: Callable[..., Any], **options: Any) -> None:
    model = network()
    optimizer = options.pop("optimizer", torch.optim.SGD)(model.parameters(), lr=0.1)
    wrapped = kit.wrap(model, optimizer, **options)
    for _ in kit.epochs(1):
        for x, y in kit.loader(examples()):
            step(wrapped, optimizer, x, y)


def with_lbfgs(kit: Kit) -> None:
    one_step(kit, lambda *_: None, optimizer=torch.optim.LBFGS)


def with_a_hook(kit: Kit) -> None:
    one_step(kit, lambda model, *_: model.register_comm_hook(None, print))


def with_join(kit: Kit) -> None:
    one_step(kit, lambda model, *_: model.join())


def with_a_process_group(kit: Kit) -> None:
    one_step(kit, lambda *_: None, process_group=object())


def around_the_wrapper(kit: Kit) -> None:
    def step(model: Any, optimizer: Any, x: torch.Tensor, y: torch.Tensor) -> None:
        mse(model.module(x), y).backward()
        optimizer.step()

    one_step(kit, step)


def outside_of_the_loop_in_evaluation_mode(kit: Kit) -> None:
    one_step(kit, lambda *_: None)
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    wrapped = kit.wrap(model, optimizer).eval()
    wrapped(torch.ones(4, 6)).sum().backward()
    optimizer.step()


def with_an_optimizer_that_nobody_gave(kit: Kit) -> None:
    def step(model: Any, optimizer: Any, x: torch.Tensor, y: torch.Tensor) -> None:
        mse(model(x), y).backward()
        optimizer.step()
        torch.optim.AdamW(model.parameters(), lr=0.1).step()

    one_step(kit, step)


def with_a_loss_that_learns(kit: Kit) -> None:
    model, loss = network(), nn.Linear(1, 1)
    optimizer = torch.optim.SGD([*model.parameters(), *loss.parameters()], lr=0.1)
    wrapped = kit.wrap(model, optimizer)
    for _ in kit.epochs(1):
        for x, y in kit.loader(examples()):
            mse(loss(wrapped(x)), y).backward()
            optimizer.step()


class Moody(torch.utils.data.Sampler[int]):
    """Draws from a generator of its own, which nobody seeds."""

    def __init__(self) -> None:
        self.own = torch.Generator()
        self.own.seed()

    def __len__(self) -> int:
        return 96

    def __iter__(self) -> Any:
        return iter(torch.randperm(96, generator=self.own).tolist())


def with_a_sampler_of_its_own_mind(kit: Kit) -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    wrapped = kit.wrap(model, optimizer)
    for _ in kit.epochs(1):
        for x, y in kit.loader(examples(), sampler=Moody()):
            mse(wrapped(x), y).backward()
            optimizer.step()


def with_rates_of_its_own(kit: Kit) -> None:
    def step(model: Any, optimizer: Any, x: torch.Tensor, y: torch.Tensor) -> None:
        optimizer.param_groups[0]["lr"] = 0.1 + dist_core.rank()
        mse(model(x), y).backward()
        optimizer.step()

    one_step(kit, step)


def with_a_state_that_cannot_come_back(kit: Kit) -> None:
    class Kept:
        def state_dict(self) -> dict[str, Any]:
            return {"recent": [1.0, deque([2.0])]}

        def load_state_dict(self, state: Any) -> None:
            raise AssertionError("never")

    dist_core.register_state("mine", Kept())
    one_step(kit, lambda *_: None)
    dist_core.trial.core.get_core().saving.save(leaving=False)


def with_torchs_own_wrapper(kit: Kit) -> None:
    nn.parallel.DistributedDataParallel(network())


def with_schedules_that_nobody_gave(kit: Kit) -> list[float]:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader, wrapped = kit.loader(examples()), kit.wrap(model, optimizer)
    schedules = [lr.StepLR(optimizer, 2, 0.5), lr.ExponentialLR(optimizer, 0.9)]
    for _ in kit.epochs(2):
        for x, y in loader:
            optimizer.zero_grad()
            mse(wrapped(x), y).backward()
            optimizer.step()
        for each in schedules:
            each.step()
    return weights_of(model)


REFUSALS: list[tuple[Habit, str, int]] = [
    (with_torchs_own_wrapper, "in place of DistributedDataParallel", PAIR),
    (with_schedules_that_nobody_gave, "sets the learning rate of SGD and was not given", 1),
    (with_lbfgs, "LBFGS evaluates its closure several times", 1),
    (with_a_hook, r"no register_comm_hook\(\)", 1),
    (with_join, r"no join\(\)", 1),
    (with_a_process_group, "was given process_group=", 1),
    (around_the_wrapper, "gradients that were not reduced over the 2 replicas", 2),
    (outside_of_the_loop_in_evaluation_mode, "gradients that were not reduced over the 2 replicas", 2),
    (with_an_optimizer_that_nobody_gave, "AdamW steps 4 parameters of a model that was wrapped without it", 1),
    (with_a_loss_that_learns, "SGD trains 2 parameters that are in no wrapped model", 1),
    (with_a_sampler_of_its_own_mind, "the sampler draws another order on each", 2),
    (with_rates_of_its_own, "the learning rates differ between the replicas", 2),
    (with_a_state_that_cannot_come_back, r"user-mine\['recent'\]\[1\] holds a collections.deque", 2),
]


@pytest.mark.parametrize(("breaks", "match", "replicas"), REFUSALS, ids=lambda each: getattr(each, "__name__", ""))
def test_a_habit_that_cannot_work_is_refused_by_name(breaks: Habit, match: str, replicas: int) -> None:
    with pytest.raises(AssertionError, match=match):
        as_trial(breaks, replicas)


def counted_by_all_reduce(kit: Kit) -> list[float]:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader, valid = kit.loader(examples()), kit.loader(examples(60), 10)
    wrapped = kit.wrap(model, optimizer)
    for _ in kit.epochs(3):
        for x, y in loader:
            optimizer.zero_grad()
            mse(wrapped(x), y).backward()
            optimizer.step()
        count = torch.zeros(1)
        with torch.no_grad():
            for x, _y in valid:
                count += len(x)
        if dist.is_initialized():
            dist.all_reduce(count)
        assert count in (60, 40), "a replica that is lost takes what it has seen with it"
    return weights_of(model)


def schedules_in_the_loop(kit: Kit) -> list[float]:
    """One of them follows a number that the replicas agree on, another has made its step by then."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedules: list[Any] = [
        lr.ExponentialLR(optimizer, 0.9),
        lr.ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=0.5, cooldown=2),
    ]
    loader, wrapped = kit.loader(examples()), kit.wrap(model, optimizer, schedules)
    for _ in kit.epochs(3):
        for x, y in loader:
            optimizer.zero_grad()
            mse(wrapped(x), y).backward()
            optimizer.step()
            schedules[0].step()
            schedules[1].step(1.0)
    return [*weights_of(model), optimizer.param_groups[0]["lr"]]


def asks_in_the_loop(kit: Kit) -> list[float]:
    """As ``trial.should_prune()`` does, between an update and the end of its step; it also reads sums there."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    schedule = lr.ExponentialLR(optimizer, 0.9)
    loader, wrapped = kit.loader(examples()), kit.wrap(model, optimizer, schedule)
    totals = Accumulator() if kit.elastic else None
    for _ in kit.epochs(3):
        for x, y in loader:
            optimizer.zero_grad()
            mse(wrapped(x), y).backward()
            optimizer.step()
            schedule.step()
            if totals is not None:
                answer = dist_core.trial.core.get_core().together(
                    lambda group: group.broadcast_json(7), otherwise=lambda: None
                )
                assert answer in (7, None)
                totals["count"] += len(x)
                with totals.synchronized():
                    assert totals.get("count", 0.0) >= 0.0
    if totals is not None:
        with totals.synchronized():
            assert totals["count"] == 3 * 96.0
    return weights_of(model)


def sums_of_evaluations(kit: Kit) -> list[float]:
    """Two evaluations an epoch, and what else code does between two training loops."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = lr.ExponentialLR(optimizer, 0.9)
    loader, valid = kit.loader(examples()), kit.loader(examples(60), 7)
    wrapped = kit.wrap(model, optimizer, schedule)
    found: dict[str, list[float]] = {"sums": []}
    if kit.elastic:
        dist_core.register_state("found", FunctionState(lambda: {"sums": list(found["sums"])}, found.update))
    for _ in kit.epochs(3):
        totals = Accumulator() if kit.elastic else None
        wrapped.train()
        for x, y in loader:
            optimizer.zero_grad()
            mse(wrapped(x), y).backward()
            optimizer.step()
        schedule.step()
        wrapped.eval()
        for _part in range(2):
            sums = torch.zeros(1)
            with torch.no_grad():
                for x, _y in valid:
                    sums += len(x)
                    if totals is not None:
                        totals["count"] += len(x)
            if kit.elastic:
                dist.all_reduce(sums)
            found["sums"].append(float(sums))
        if totals is not None:
            with totals.synchronized():
                assert totals["count"] == 120.0
    return [*weights_of(model), *found["sums"], optimizer.param_groups[0]["lr"]]


@pytest.mark.parametrize(
    ("trains", "place"),
    [
        (sums_of_evaluations, "in an evaluation"),
        (sums_of_evaluations, LATE_IN_AN_EVALUATION),
        (sums_of_evaluations, "at the end of a loop"),
        (asks_in_the_loop, "in the body"),
        (asks_in_the_loop, "in a step"),
        (schedules_in_the_loop, "in the body"),
        (two_models_in_turns, "between two updates"),
        (two_optimizers_for_one_model, "between two updates"),
        (a_plateau_on_the_summed_metric, "in an evaluation"),
        (a_plateau_on_the_summed_metric, "at the end of a loop"),
        (counted_by_all_reduce, "at the end of a loop"),
        (counted_by_all_reduce, "in an evaluation"),
        (a_forgotten_train, "in an evaluation"),
    ],
    ids=lambda each: getattr(each, "__name__", each),
)
def test_survivors_of_a_loss_train_on_wherever_it_happens(trains: Habit, place: str) -> None:
    """No update is made twice, and none is left out."""
    survivors = with_a_loss(trains, place)
    assert survivors[1] is None
    for weights in (survivors[0], survivors[2]):
        assert weights == pytest.approx(in_plain_pytorch(trains), abs=1e-5)


def draws(kit: Kit) -> list[float]:
    """What each replica draws from the three generators once training has begun."""
    drawn: list[float] = []
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    wrapped = kit.wrap(model, optimizer)
    for _ in kit.epochs(1):
        for x, y in kit.loader(examples()):
            mse(wrapped(x), y).backward()
            optimizer.step()
            drawn = drawn or [random.random(), float(np.random.rand()), float(torch.rand(()))]
    return drawn


def test_replicas_draw_different_numbers_and_each_the_same_in_another_run() -> None:
    def without_pythons(rows: list[list[float]]) -> list[list[float]]:
        # NumPy and Python are seeded by nobody on rank 0, where they go on as they were.
        return [row if index else row[2:] for index, row in enumerate(rows)]

    first = as_trial(draws, 3)
    assert len({tuple(row) for row in first}) == 3
    for column in range(3):
        assert len({row[column] for row in first}) == 3
    assert without_pythons(as_trial(draws, 3)) == without_pythons(first)


def counts(kit: Kit, *, late: bool = False) -> list[float]:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = kit.loader(examples())
    wrapped = kit.wrap(model, optimizer)
    counted = []
    for _ in kit.epochs(3):
        totals = Accumulator()
        for x, y in loader:
            optimizer.zero_grad()
            loss = mse(wrapped(x), y)
            if not late:
                totals["count"] += len(x)
            loss.backward()
            optimizer.step()
            if late:
                totals["count"] += len(x)
        with totals.synchronized():
            counted.append(totals["count"])
    return counted


def counts_late(kit: Kit) -> list[float]:
    return counts(kit, late=True)


def test_a_sum_counts_each_sample_once_although_a_replica_is_lost_and_a_body_runs_again() -> None:
    survivors = with_a_loss(counts, "in a step")
    assert survivors[0] == survivors[2] == [96.0, 96.0, 96.0]


def test_a_lost_replica_takes_along_what_it_added_after_its_last_step() -> None:
    survivors = with_a_loss(counts_late, "in a step")
    assert survivors[0] == survivors[2] == [96.0, 96.0 - 8.0, 96.0]


def many_sums(kit: Kit) -> list[dict[str, float]]:
    """More keys than ride in a step's round, of two accumulators, some of which only one replica adds to."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = kit.loader(examples())
    wrapped = kit.wrap(model, optimizer)
    totals, others = Accumulator(), Accumulator(others=1.0)
    summed = []
    for epoch in kit.epochs(3):
        for x, y in loader:
            optimizer.zero_grad()
            loss = mse(wrapped(x), y)
            for number in range(20):
                totals[f"all-{number}"] += len(x)
            others["others"] += 1
            for number in range(15):
                others[f"{epoch}-{number}"] += len(x)
            loss.backward()
            optimizer.step()
        with totals.synchronized(), others.synchronized():
            summed.append({**totals, **others})
    return summed


def test_any_number_of_sums_survives_a_loss() -> None:
    survivors = with_a_loss(many_sums, "in a step")
    assert survivors[0] == survivors[2]
    for epoch, sums in enumerate(survivors[0]):
        assert len(sums) == 20 + 1 + 15 * (epoch + 1)
        assert {value for key, value in sums.items() if key != "others"} <= {96.0, 96.0 * (epoch + 1)}
    # A step of three replicas adds three, one of two adds two.
    assert survivors[0][-1]["others"] == 1 + 7 * 3 + 5 * 2


def takes_its_time(kit: Kit) -> tuple[list[float], float]:
    began = time.monotonic()
    return the_textbook(kit), time.monotonic() - began


def test_a_loss_that_no_connection_tells_of_is_heard_of_from_the_scheduler() -> None:
    survivors = with_a_loss(takes_its_time, FROZEN)
    expected = in_plain_pytorch(the_textbook)
    for weights, seconds in (survivors[0], survivors[2]):
        assert weights == pytest.approx(expected, abs=1e-5)
        assert seconds < FROZEN_SECONDS


def a_step_longer_than_the_grace(kit: Kit) -> None:
    def step(model: Any, optimizer: Any, x: torch.Tensor, y: torch.Tensor) -> None:
        dist_core.generations.watch.GRACE_MARGIN_SECONDS = 59.7
        core = dist_core.trial.core.get_core()
        assert core.membership is not None
        core.membership.told_to_end()
        time.sleep(30.0)

    one_step(kit, step)


@pytest.mark.parametrize("missed", ["before its update", "after its update"])
def test_who_misses_the_last_step_with_one_that_leaves_is_met_in_the_next_generation(missed: str) -> None:
    """As if the leaver's process had ended before its part of that step came through; the others cannot know."""
    left, *stayed = with_a_leaver(the_textbook, missed)
    assert left is None
    plain = in_plain_pytorch(the_textbook)
    for weights in stayed:
        assert weights == pytest.approx(plain, rel=1e-5, abs=1e-6)


def test_a_replica_that_comes_to_no_place_to_leave_at_says_what_is_lost() -> None:
    [sentence] = told_by_one_replica(a_step_longer_than_the_grace)
    assert "came to no place where it could within 0 s" in sentence
    assert "what it has done since the last checkpoint is lost" in sentence
