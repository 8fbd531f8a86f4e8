"""Schedules of the learning rate, although the batch adapts and several steps become one."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler as lr

from dist_core import AdaptiveDataLoader, AdaptiveDataParallel, remaining_epochs_until
from dist_core.trial.current import get_core
from tests.support.small_trials import ConstantGradient, Numbered, classes, classifier

pytestmark = pytest.mark.usefixtures("fresh_core")


def test_a_learning_rate_scheduler_fits_before_and_after_wrapping() -> None:
    model = classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    before = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    loader = AdaptiveDataLoader(classes(), batch_size=50)
    wrapped = AdaptiveDataParallel(model, optimizer, before)
    after = torch.optim.lr_scheduler.ExponentialLR(optimizer, 1.0)
    for _ in remaining_epochs_until(2):
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(wrapped(x), y).backward()
            optimizer.step()
        before.step()
        after.step()
    assert optimizer.param_groups[0]["lr"] == 0.25


@pytest.mark.parametrize("samples", [403, 400, 171])
def test_a_one_cycle_schedule_stays_at_its_end_when_the_last_step_is_worth_several(samples: int) -> None:
    model = ConstantGradient()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    total = 2 * math.ceil(samples / 8)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=total)
    loader = AdaptiveDataLoader(Numbered(samples), batch_size=8)
    loader.autoscale_batch_size(64)
    wrapped = AdaptiveDataParallel(model, optimizer, schedule, scaling_rule="none", noise_every=1000)
    core = get_core()
    for _ in remaining_epochs_until(2):
        for x in loader:
            assert core.adaptation is not None
            core.adaptation.proposal = lambda *_: (64, 0)  # type: ignore[method-assign]
            for _ in range(4 - wrapped.noise.samples):
                wrapped.noise.update(1.0, 64.0, work=1.0)
            optimizer.zero_grad()
            wrapped(x).mean().backward()
            optimizer.step()
            schedule.step()
    assert total - 8 <= schedule.last_epoch <= total


def schedules_of_torch(total: int) -> dict[str, Callable[[torch.optim.Optimizer], Any]]:
    """Each as a script makes it that takes so many steps at its initial batch size."""
    return {
        "one cycle": lambda each: lr.OneCycleLR(each, max_lr=0.2, total_steps=total),
        "cosine": lambda each: lr.CosineAnnealingLR(each, total),
        "warm restarts": lambda each: lr.CosineAnnealingWarmRestarts(each, total // 3),
        "sequential": lambda each: lr.SequentialLR(
            each, [lr.LinearLR(each, 0.1, 1.0, 10), lr.CosineAnnealingLR(each, total - 10)], milestones=[10]
        ),
        "chained": lambda each: lr.ChainedScheduler([lr.ConstantLR(each, 0.5, 9), lr.ExponentialLR(each, 0.99)], each),
        "lambda": lambda each: lr.LambdaLR(each, lambda step: 1.0 / (1.0 + step)),
        "multiplicative": lambda each: lr.MultiplicativeLR(each, lambda step: 0.99),
        "cyclic": lambda each: lr.CyclicLR(each, 0.05, 0.2, step_size_up=7),
        "polynomial": lambda each: lr.PolynomialLR(each, total),
        "step": lambda each: lr.StepLR(each, 9),
        "multi-step": lambda each: lr.MultiStepLR(each, [total // 3, 2 * total // 3]),
    }


def steps_made(schedule: Any) -> int:
    parts = schedule._schedulers if isinstance(schedule, lr.ChainedScheduler) else [schedule]
    return int(parts[-1].last_epoch)


@pytest.mark.parametrize("by_epoch", [False, True])
@pytest.mark.parametrize("name", schedules_of_torch(50))
def test_a_schedule_is_where_it_would_be_with_small_steps_although_the_batch_adapts(name: str, by_epoch: bool) -> None:
    """Its rate is that of as many steps at the initial batch size as were gained, or of the epochs that ended."""
    samples, epochs = 200, 2
    total = epochs if by_epoch else epochs * samples // 8
    make = schedules_of_torch(epochs * samples // 8)[name]
    model = ConstantGradient()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = make(optimizer)
    loader = AdaptiveDataLoader(Numbered(samples), batch_size=8)
    loader.autoscale_batch_size(32)
    wrapped = AdaptiveDataParallel(model, optimizer, schedule, scaling_rule="none", noise_every=1000)
    core = get_core()
    rates = {}
    for _ in remaining_epochs_until(epochs):
        for x in loader:
            assert core.adaptation is not None
            core.adaptation.proposal = lambda *_: (32, 0)  # type: ignore[method-assign]
            for _ in range(4 - wrapped.noise.samples):
                wrapped.noise.update(1.0, 64.0, work=1.0)
            optimizer.zero_grad()
            wrapped(x).mean().backward()
            optimizer.step()
            if not by_epoch:
                schedule.step()
                rates[steps_made(schedule)] = optimizer.param_groups[0]["lr"]
        if by_epoch:
            schedule.step()
            rates[steps_made(schedule)] = optimizer.param_groups[0]["lr"]
    small = torch.optim.SGD([torch.zeros(1)], lr=0.1, momentum=0.0)
    expected = make(small)
    rates_of_small = {}
    for step in range(1, total + 1):
        small.step()
        expected.step()
        rates_of_small[step] = small.param_groups[0]["lr"]
    assert rates == pytest.approx({step: rates_of_small[step] for step in rates})
    assert total - 4 <= max(rates) <= total
    assert by_epoch or len(rates) < 0.7 * total


@pytest.mark.parametrize("adaptive", [False, True])
def test_a_schedule_stepped_within_the_loop_follows_progress(adaptive: bool) -> None:
    """At four times the batch, whose every step is worth three small ones, the schedule moves three steps at a time."""
    model = ConstantGradient()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1.0 + step))
    by_hand = torch.optim.lr_scheduler.LambdaLR(torch.optim.SGD([torch.zeros(1)], lr=1.0), lambda step: 1.0)
    loader = AdaptiveDataLoader(Numbered(400), batch_size=8)
    if adaptive:
        loader.autoscale_batch_size(32)
    wrapped = AdaptiveDataParallel(model, optimizer, schedule, scaling_rule="none", noise_every=1000)
    core = get_core()
    steps = 0
    for _ in remaining_epochs_until(1):
        for x in loader:
            assert core.adaptation is not None
            core.adaptation.proposal = lambda *_: (32, 0) if adaptive else None  # type: ignore[method-assign]
            for _ in range(4 - wrapped.noise.samples):
                wrapped.noise.update(1.0, 64.0, work=1.0)
            optimizer.zero_grad()
            wrapped(x).mean().backward()
            optimizer.step()
            schedule.step()
            if wrapped.is_last_micro_batch:
                by_hand.optimizer.step()
                by_hand.step()
                steps += 1
    assert by_hand.last_epoch == steps == core.position.steps
    if adaptive:
        assert 2.0 < wrapped.gain <= (8 + 1) / (8 / 4 + 1)
        assert schedule.last_epoch == pytest.approx(core.position.progress / 8, abs=3)
        assert schedule.last_epoch > 1.5 * steps
    else:
        assert schedule.last_epoch == steps == 50
    schedule.step()
    assert schedule.last_epoch == pytest.approx(core.position.progress / 8 + 1, abs=3)


def test_two_models_with_one_optimizer_scale_its_rate_once() -> None:
    first, second = ConstantGradient(), ConstantGradient()
    optimizer = torch.optim.SGD([*first.parameters(), *second.parameters()], lr=1.0)
    loader = AdaptiveDataLoader(Numbered(120), batch_size=4)
    loader.autoscale_batch_size(8)
    one = AdaptiveDataParallel(first, optimizer, scaling_rule="linear", noise_every=1000)
    two = AdaptiveDataParallel(second, optimizer, scaling_rule="linear", noise_every=1000)
    core = get_core()
    moved: set[float] = set()
    for _ in remaining_epochs_until(1):
        for x in loader:
            assert core.adaptation is not None
            core.adaptation.proposal = lambda *_: (8, 0)  # type: ignore[method-assign]
            before = first.weight.item(), second.weight.item()
            optimizer.zero_grad()
            (one(x).mean() + two(x).mean()).backward()
            optimizer.step()
            if one.is_last_micro_batch:
                assert one.part.step_place.stepped
                assert two.part.step_place.stepped
                moved.add(round(before[0] - first.weight.item(), 5))
                assert before[0] - first.weight.item() == before[1] - second.weight.item()
    assert max(moved) == 2.0
