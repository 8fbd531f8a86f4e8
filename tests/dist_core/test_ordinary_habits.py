"""Training code as people write it ends with the weights of plain PyTorch, or is refused by name.

Each habit trains in plain PyTorch and as an elastic trial; see tests/support/habits.py.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import lr_scheduler as lr
from torch.utils.data import IterableDataset, TensorDataset

import dist_core
import dist_core.generations.membership
from tests.support.habits import (
    PAIR,
    RESCALED,
    Habit,
    Kit,
    Numbered,
    as_trial,
    examples,
    in_plain_pytorch,
    network,
    weights_of,
)
from tests.support.shared_habits import (
    HABITS,
    a_closure_by_name,
    habit,
    mse,
    simple,
    two_models_in_turns,
)

USUAL = [(1, 1), (2, 3), (RESCALED, 2)]
SLOW = [(RESCALED, 1)]
"""Replicas, and passes a step."""


@habit
def several_forward_passes_of_a_loss(kit: Kit) -> list[float]:
    def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor, y: torch.Tensor) -> None:
        optimizer.zero_grad()
        (mse(model(x), y) + mse(model(x), model(0.9 * x))).backward()
        optimizer.step()

    return simple(kit, step)


class Scaled(nn.Module):
    """Contrasts texts with images, say: its outputs come with a weight that only the loss uses."""

    def __init__(self) -> None:
        super().__init__()
        self.inside = network()
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.inside(x), self.scale


@habit
def a_weight_among_the_outputs(kit: Kit) -> list[float]:
    def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor, y: torch.Tensor) -> None:
        outputs, scale = model(x)
        optimizer.zero_grad()
        mse(outputs * scale, y).backward()
        optimizer.step()

    return simple(kit, step, model=Scaled())


@habit
def a_weight_that_only_the_loss_uses(kit: Kit) -> list[float]:
    scaled = Scaled()

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor, y: torch.Tensor) -> None:
        optimizer.zero_grad()
        outputs, _ = model(x)
        mse(outputs * scaled.scale, y).backward()
        optimizer.step()

    return simple(kit, step, model=scaled)


@pytest.mark.parametrize(("replicas", "passes"), [(1, 1), (1, 3), (2, 1), (2, 3)])
def test_a_schedule_by_the_part_of_the_epoch_counts_batches_and_not_passes(replicas: int, passes: int) -> None:
    """Replicas that join in an epoch count otherwise, and are told so."""
    expected = in_plain_pytorch(a_schedule_by_the_part_of_the_epoch)
    for weights in as_trial(a_schedule_by_the_part_of_the_epoch, replicas, passes):
        assert weights == pytest.approx(expected, abs=1e-5)


class Normal(nn.Module):
    """Gives a distribution, as policies do: an object in which nobody finds a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.inside = network()

    def forward(self, x: torch.Tensor) -> torch.distributions.Normal:
        return torch.distributions.Normal(self.inside(x), 1.0)


@habit
def outputs_that_are_objects(kit: Kit) -> list[float]:
    def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor, y: torch.Tensor) -> None:
        optimizer.zero_grad()
        (-model(x).log_prob(y).mean()).backward()
        optimizer.step()

    return simple(kit, step, model=Normal())


@habit
def a_penalty_with_a_backward_pass_of_its_own(kit: Kit) -> list[float]:
    def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor, y: torch.Tensor) -> None:
        optimizer.zero_grad()
        (0.1 * torch.stack([weight.square().sum() for weight in model.parameters()]).sum()).backward()
        mse(model(x), y).backward()
        optimizer.step()

    return simple(kit, step)


def a_schedule_by_the_part_of_the_epoch(kit: Kit) -> list[float]:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = lr.CosineAnnealingWarmRestarts(optimizer, 2)
    loader, wrapped = kit.loader(examples()), kit.wrap(model, optimizer, schedule)
    for epoch in kit.epochs(3):
        for index, (x, y) in enumerate(loader):
            optimizer.zero_grad()
            mse(wrapped(x), y).backward()
            optimizer.step()
            schedule.step(epoch + index / len(loader))
    return weights_of(model)


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


def in_classes(kit: Kit, loss_of: Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, float]]) -> list[float]:
    """Train on classes of very unequal sizes; ``loss_of`` gives the loss, and what it is a mean over."""
    torch.manual_seed(0)
    model = nn.Linear(6, 3)
    x, y = examples().tensors
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    loader = kit.loader(TensorDataset(x, (y[:, 0] > 0).long() + (y[:, 0] > 1.5).long()))
    wrapped = kit.wrap(model, optimizer)
    for _ in kit.epochs(3):
        for inputs, classes in loader:
            optimizer.zero_grad()
            loss, amount = loss_of(wrapped(inputs), classes)
            if kit.elastic:
                loader.weigh(amount)
            loss.backward()
            optimizer.step()
    return weights_of(model)


@habit
def class_weights(kit: Kit) -> list[float]:
    weights = torch.tensor([0.2, 1.0, 6.0])

    def loss_of(outputs: torch.Tensor, classes: torch.Tensor) -> tuple[torch.Tensor, float]:
        return nn.functional.cross_entropy(outputs, classes, weights), float(weights[classes].sum())

    return in_classes(kit, loss_of)


@habit
def labels_that_do_not_count(kit: Kit) -> list[float]:
    """Whole passes may have none that counts: class 1 alone does, a third of the samples."""

    def loss_of(outputs: torch.Tensor, classes: torch.Tensor) -> tuple[torch.Tensor, float]:
        counted = int((classes == 1).sum())
        ignored = torch.where(classes == 1, classes, -100)
        loss = nn.functional.cross_entropy(outputs, ignored, reduction="sum") / max(1, counted)
        return loss, counted

    return in_classes(kit, loss_of)


def with_a_bad_sample() -> TensorDataset:
    """One sample of the second batch is no number."""
    x, y = (tensor.clone() for tensor in examples().tensors)
    x[30] = float("nan")
    return TensorDataset(x, y)


@habit
def batches_left_out_behind_the_forward_pass(kit: Kit) -> list[float]:
    """One replica alone sees that the loss is no number."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader, wrapped = kit.loader(with_a_bad_sample()), kit.wrap(model, optimizer)
    for _ in kit.epochs(3):
        for x, y in loader:
            loss = mse(wrapped(x), y)
            if torch.isnan(loss):
                continue
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return weights_of(model)


@habit
def batches_left_out_before_the_forward_pass(kit: Kit) -> list[float]:
    """The schedule stands still with the optimizer."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    schedule = lr.StepLR(optimizer, 4, 0.5)
    loader, wrapped = kit.loader(with_a_bad_sample()), kit.wrap(model, optimizer, schedule)
    for _ in kit.epochs(3):
        for x, y in loader:
            if torch.isnan(x).any():
                continue
            optimizer.zero_grad()
            mse(wrapped(x), y).backward()
            optimizer.step()
            schedule.step()
    return weights_of(model)


@habit
def batches_left_out_by_a_step_without_gradients(kit: Kit) -> list[float]:
    """The optimizer steps all the same, on gradients that are 0; losses are weighed."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader, wrapped = kit.loader(with_a_bad_sample()), kit.wrap(model, optimizer)
    for _ in kit.epochs(3):
        for x, y in loader:
            optimizer.zero_grad(set_to_none=False)
            loss = mse(wrapped(x), y)
            if torch.isfinite(loss):
                if kit.elastic:
                    loader.weigh(len(x))
                loss.backward()
            optimizer.step()
    return weights_of(model)


@habit
def layers_unfrozen_later(kit: Kit) -> list[float]:
    return with_weights_that_change(kit, at_first=False)


@habit
def layers_frozen_later(kit: Kit) -> list[float]:
    return with_weights_that_change(kit, at_first=True)


@habit
def a_group_added_later(kit: Kit) -> list[float]:
    return with_weights_that_change(kit, at_first=False, added=True)


def with_weights_that_change(kit: Kit, *, at_first: bool, added: bool = False) -> list[float]:
    model = network()
    model[0].requires_grad_(at_first)
    trained = model[3].parameters() if added else model.parameters()
    optimizer = torch.optim.SGD(trained, lr=0.1, momentum=0.9)
    loader, wrapped = kit.loader(examples()), kit.wrap(model, optimizer)
    for epoch in kit.epochs(3):
        if epoch == 1:
            model[0].requires_grad_(not at_first)
            if added:
                optimizer.add_param_group({"params": list(model[0].parameters())})
        for x, y in loader:
            optimizer.zero_grad()
            mse(wrapped(x), y).backward()
            optimizer.step()
    return weights_of(model)


@habit
def weights_by_another_name(kit: Kit) -> list[float]:
    """A state that is kept without a copy follows the weights, and is no average of them."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader, wrapped = kit.loader(examples()), kit.wrap(model, optimizer)
    best: dict[str, torch.Tensor] = {}
    for _ in kit.epochs(2):
        for x, y in loader:
            optimizer.zero_grad()
            mse(wrapped(x), y).backward()
            optimizer.step()
            best = model.state_dict()
    return [*weights_of(model), float(len(best))]


class Streamed(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(examples())


@habit
def a_stream_without_a_length(kit: Kit) -> list[float]:
    """Whoever joins behind the last step of a pass has to know that it was the last one."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = kit.loader(Streamed())
    wrapped = kit.wrap(model, optimizer)
    for _ in kit.epochs(3):
        for x, y in loader:
            optimizer.zero_grad()
            mse(wrapped(x), y).backward()
            optimizer.step()
    return weights_of(model)


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
def an_average_that_moves_with_a_step_s_last_pass(kit: Kit) -> list[float]:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    average = [weight.detach().clone() for weight in model.parameters()]
    loader, wrapped = kit.loader(examples()), kit.wrap(model, optimizer)
    for _ in kit.epochs(3):
        for x, y in loader:
            optimizer.zero_grad()
            mse(wrapped(x), y).backward()
            optimizer.step()
            if is_whole(wrapped):
                for mean, weight in zip(average, model.parameters(), strict=True):
                    mean.lerp_(weight.detach(), 0.1)
    return [*weights_of(model), *(float(value) for mean in average for value in mean.flatten())]


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
            # Groups of all replicas are made and destroyed, as libraries do.
            group = dist.new_group()
            dist.all_reduce(sums, group=group)
            dist.destroy_process_group(group)
            assert dist.get_world_size() == dist_core.world_size() and dist.get_rank() == dist_core.rank()
            everybody = [torch.zeros(1) for _ in range(dist.get_world_size())]
            dist.all_gather(everybody, torch.tensor([float(dist.get_rank())]))
            assert [int(each) for each in everybody] == list(range(dist.get_world_size()))
            dist.barrier()
        assert sums[1] == 60
        optimizer.param_groups[0]["lr"] = 0.01 * round(10.0 * float(sums[0] / sums[1]), 3)
    return weights_of(model)


@habit
def gradients_set_by_their_data(kit: Kit) -> list[float]:
    """As Grokfast and gradient centralisation do: what was the gradient's own memory then lies in no bucket."""

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor, y: torch.Tensor) -> None:
        optimizer.zero_grad()
        mse(model(x), y).backward()
        for weight in model.parameters():
            if weight.grad is not None:
                weight.grad.data = weight.grad.data - weight.grad.data.mean(0, keepdim=True)
        optimizer.step()

    return simple(kit, step)


IN_TURNS = "uses a model after an optimizer has stepped"


TWINS = (a_closure_by_name, in_double_precision, schedules_by_epoch, layers_frozen_later, compiled_outside)
"""Habits that another one is like where replicas come and go: tried there with the slow tests."""
COMPILED = (compiled_inside, compiled_outside)
"""A compiler takes its time: one of them is tried with the others, on two replicas."""


def habits_and_runs() -> Iterator[Any]:
    for trains in HABITS:
        for replicas, passes in USUAL + SLOW:
            # This one is refused in its first step: nobody is left whom others could join.
            if (trains, replicas) != (two_models_in_turns, RESCALED) or passes == 1:
                name = f"{trains.__name__}-{replicas}-{passes}"
                twin = trains in TWINS and (replicas, passes) == (RESCALED, 2)
                compiles = trains in COMPILED and (trains, replicas) != (compiled_outside, 2)
                marks = [pytest.mark.slow] if twin or compiles or (replicas, passes) in SLOW else []
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


def one_optimizer_of_two_models_that_train_by_turns(kit: Kit) -> list[float]:
    """Each model has steps of its own: where one has no gradients, the other's update is made."""
    models = [network(seed=seed) for seed in (0, 1)]
    optimizer = torch.optim.SGD([each for model in models for each in model.parameters()], lr=0.1)
    loader = kit.loader(Numbered(examples()))
    wrapped = [kit.wrap(model, optimizer) for model in models]
    for _ in kit.epochs(3):
        for numbers, (x, y) in loader:
            optimizer.zero_grad()
            mse(wrapped[int(numbers.max()) % 48 < 24](x), y).backward()
            optimizer.step()
    return weights_of(*models)


@pytest.mark.parametrize("replicas", [1, 2])
def test_where_one_model_has_no_gradients_the_others_update_is_made(replicas: int) -> None:
    plain = in_plain_pytorch(one_optimizer_of_two_models_that_train_by_turns)
    for found in as_trial(one_optimizer_of_two_models_that_train_by_turns, replicas):
        assert found == pytest.approx(plain, abs=1e-5)


def seeds_of_each_replicas_own(kit: Kit) -> list[list[int]]:
    """Samples that this replica has had of each of two loaders, in a script that adds its rank to the seed."""
    model = network()
    torch.manual_seed(7 + dist_core.rank())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loaders = [kit.loader(Numbered(examples()), shuffle=True) for _ in range(2)]
    wrapped = kit.wrap(model, optimizer)
    seen: list[list[int]] = [[], []]
    for _ in kit.epochs(1):
        for loader, had in zip(loaders, seen, strict=True):
            for numbers, (x, y) in loader:
                had.extend(numbers.tolist())
                optimizer.zero_grad()
                mse(wrapped(x), y).backward()
                optimizer.step()
    return seen


@pytest.mark.parametrize("replicas", [2, PAIR])
def test_the_first_replicas_seed_orders_the_samples_of_all(replicas: int) -> None:
    of_replicas = as_trial(seeds_of_each_replicas_own, replicas)
    for of_loader in zip(*of_replicas, strict=True):
        # A joiner's own passes, which do not count, come first.
        had = [number for each in of_loader for number in each[-48:]]
        assert sorted(had) == list(range(96))
