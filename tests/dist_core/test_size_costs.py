"""Batch sizes that are computed with for the first time: what that costs, and who waits until it is repaid."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from torch import nn

import dist_core
from dist_core.data.batch_size import Adaptation, SizeCosts
from dist_core.goodput import BatchBounds, Configuration, GradientStatistics
from dist_core.torch_private import compiled_graphs
from dist_core.trial.current import get_core, reset_core
from tests.support.habits import examples


def after(sizes: list[tuple[int, list[float]]], *, compiles: bool = True) -> SizeCosts:
    """Costs after passes at these sizes took so many seconds, from time 0 on."""
    costs, now = SizeCosts(0.0), 0.0
    for size, passes in sizes:
        for seconds in passes:
            now += seconds
            costs.note(size, seconds, now, generation=1, compiles=compiles)
    return costs


def test_the_first_pass_tells_what_a_size_costs_beyond_the_others() -> None:
    assert after([(8, [5.0, 1.0, 1.2])]).seconds == pytest.approx(3.9)
    assert after([(8, [5.0, 1.0])]).seconds == 0.0
    assert after([(8, [5.0, 1.0, 1.0, 1.0]), (16, [3.0, 2.0, 2.0])]).seconds == 1.0
    assert after([(8, [5.0, 1.0, 1.0]), (16, [1.0, 2.0, 2.0])]).seconds == 0.0


def test_without_a_compiled_model_the_first_size_begins_with_what_is_started_once() -> None:
    assert after([(8, [5.0, 1.0, 1.0])], compiles=False).seconds == 0.0
    assert after([(8, [5.0, 1.0, 1.0]), (16, [3.0, 2.0, 2.0])], compiles=False).seconds == 1.0


def test_a_generations_first_pass_waits_for_others_and_says_nothing() -> None:
    costs = after([(8, [5.0, 1.0, 1.0])])
    for seconds in (50.0, 1.0, 1.0):
        costs.note(16, seconds, 100.0, generation=2, compiles=True)
    assert costs.seconds == 4.0
    assert costs.is_repaid(16, 1.0, 100.0)


def test_a_new_size_waits_until_the_latest_new_one_was_used_as_long_as_it_would_take_to_pay() -> None:
    costs = after([(8, [5.0, 1.0, 1.0])])
    # It costs 4 s; at twice the goodput 8 s in use save as much as that. The first size was new at 5 s.
    assert not costs.is_repaid(16, 2.0, 12.9)
    assert costs.is_repaid(16, 2.0, 13.1)
    assert not costs.is_repaid(16, 1.1, 13.1)
    assert not costs.is_repaid(16, 0.9, 1e9)
    assert costs.is_repaid(8, 1.0, 5.0)


def test_the_batch_stays_while_a_change_costs_more_than_it_gains() -> None:
    def adaptation() -> Adaptation:
        made = Adaptation(BatchBounds(init_batch=32, max_batch=256), lambda: GradientStatistics(sqr=1.0, var=100.0))
        for _ in range(3):
            made.timed(Configuration(1, 1, 32), gradient_seconds=0.1, optim_seconds=0.1)
            made.timed(Configuration(1, 1, 16), gradient_seconds=0.1, optim_seconds=0.1)
        return made

    free, costly = adaptation(), adaptation()
    for seconds in (1000.0, 0.1, 0.1):
        costly.size_costs.note(32, seconds, time.monotonic(), generation=1, compiles=True)
    atomic, accumulation = free.choose(1, 1)
    assert atomic * (accumulation + 1) > 32
    assert costly.choose(1, 1) == (32, 0)
    # Where it cannot stay within the bounds it changes all the same.
    assert costly.choose(1, 16, switching=True)[0] < 32


def test_a_compiled_model_pays_for_sizes_as_long_as_they_are_new() -> None:
    torch._dynamo.reset()
    reset_core()
    before = compiled_graphs()
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))
    compiled: Any = torch.compile(model, backend="eager", dynamic=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    loader = dist_core.AdaptiveDataLoader(examples(96), batch_size=8)
    loader.autoscale_batch_size(32)
    wrapped = dist_core.AdaptiveDataParallel(compiled, optimizer)
    core, steps = get_core(), 0
    for _ in dist_core.remaining_epochs_until(4):
        for x, y in loader:
            assert core.adaptation is not None
            # Eight steps at each of two sizes, in turns.
            size = 8 if steps // 8 % 2 == 0 else 16
            core.adaptation.proposal = lambda *_, size=size: (size, 0)  # type: ignore[method-assign]
            optimizer.zero_grad()
            nn.functional.mse_loss(wrapped(x), y).backward()
            optimizer.step()
            steps += 1
    assert compiled_graphs() > before
    assert core.adaptation is not None
    costs = core.adaptation.size_costs
    assert costs.seconds > 0.01
    assert not costs.is_repaid(24, 1.0 + 1e-6, time.monotonic())
    assert costs.is_repaid(16, 1.0, time.monotonic())
