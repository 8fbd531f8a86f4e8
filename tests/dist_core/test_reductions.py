"""One suite for all ways to reduce gradients: replicas train as one process does, whatever model and batches."""

from __future__ import annotations

import contextlib
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import TensorDataset

from dist_core import AdaptiveDataLoader, AdaptiveDataParallel, remaining_epochs_until
from dist_core.data.order import ElasticCursor
from dist_core.gradients import bucket_reducer
from dist_core.gradients.reduce import STRATEGIES, reduction_strategy
from dist_core.gradients.reduce.strategies import PowerSGD
from dist_core.torch_private import HashStore, layout_of_buckets, replace_process_group
from dist_core.trial.current import get_core, reset_core
from tests.support.habits import hear
from tests.support.perceptrons import MODELS, SAMPLES, Perceptron, Points, train
from tests.support.ranks import run_ranks

EXACT = [name for name in STRATEGIES if reduction_strategy(name).exact]
LOSSY = {"bf16": 3e-2, "fp16": 3e-3, "power_sgd": 0.5}
"""How far weights may be off after training, relative to how far training moved them."""


@pytest.mark.parametrize("name", EXACT)
@pytest.mark.parametrize("model", MODELS)
def test_exact_strategies_train_as_one_process_does(name: str, model: str, alone: Any) -> None:
    expected = alone(model)
    for weights in run_ranks(train, 3, model, name, 11):
        torch.testing.assert_close(torch.tensor(weights), expected, rtol=1e-4, atol=2e-6)


def train_compressed(name: str, place: str = "cpu") -> list[float]:
    """Steps that measure the noise are reduced exactly; here that is the first one alone."""
    strategy = PowerSGD(warm_up_steps=2) if name == "power_sgd" else reduction_strategy(name)
    return train("perceptron", strategy, 11, place=place, noise_every=1000)


@pytest.mark.parametrize("name", LOSSY)
def test_lossy_strategies_stay_close_and_all_replicas_agree(name: str, alone: Any) -> None:
    expected = alone("perceptron")
    torch.manual_seed(0)
    before = torch.cat([parameter.detach().flatten() for parameter in Perceptron().parameters()])
    results = run_ranks(train_compressed, 2, name)
    exact = run_ranks(train, 2, "perceptron", "all_reduce", 11)
    assert results[0] == results[1] != exact[0]
    error = (torch.tensor(results[0]) - expected).norm() / (expected - before).norm()
    assert error < LOSSY[name]


def test_clipping_sees_the_whole_gradient(alone: Any) -> None:
    expected = alone("perceptron", clip=True)
    for weights in run_ranks(train, 2, "perceptron", "all_reduce", 11, True):
        torch.testing.assert_close(torch.tensor(weights), expected, rtol=1e-4, atol=2e-6)


def test_more_replicas_than_samples_in_a_batch(alone: Any) -> None:
    expected = alone("perceptron", batch=3)
    for weights in run_ranks(train, 4, "perceptron", "all_reduce", 3):
        torch.testing.assert_close(torch.tensor(weights), expected, rtol=1e-4, atol=2e-6)


def train_over_three_groups() -> list[float]:
    return train("perceptron", reduction_strategy("round_robin", num_groups=3), 11)


def test_options_of_strategies(alone: Any) -> None:
    expected = alone("perceptron")
    for weights in run_ranks(train_over_three_groups, 3):
        torch.testing.assert_close(torch.tensor(weights), expected, rtol=1e-4, atol=2e-6)


class Mean(nn.Module):
    """The gradient of its mean output is the mean of its inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * x


def numbered(count: int) -> TensorDataset:
    return TensorDataset(torch.arange(count))


def accumulate(passes: int, clear: str) -> list[tuple[float, list[int]]]:
    """By how much each step moved the weight, and the samples this replica computed for it."""
    reset_core()
    model = Mean()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    loader = AdaptiveDataLoader(numbered(200), batch_size=8, shuffle=True)
    loader.autoscale_batch_size(60, local_bsz_bounds=(1, 10), gradient_accumulation=True)
    wrapped = AdaptiveDataParallel(model, optimizer, scaling_rule="none", noise_every=3)
    core = get_core()
    steps: list[tuple[float, list[int]]] = []
    samples: list[int] = []
    for _ in remaining_epochs_until(2):
        for (x,) in loader:
            assert core.adaptation is not None
            core.adaptation.proposal = lambda *_: (5 + core.position.steps % 3, core.position.steps // 3 % 3)  # type: ignore[method-assign]
            samples.extend(x.tolist())
            before = model.weight.item()
            if clear == "first":
                optimizer.zero_grad()
            for _ in range(passes):
                wrapped(x.float()).mean().backward()
            if wrapped.is_last_micro_batch:
                nn.utils.clip_grad_norm_(model.parameters(), 1e6)
            optimizer.step()
            if clear == "last":
                optimizer.zero_grad(set_to_none=False)
            if wrapped.is_last_micro_batch:
                steps.append((before - model.weight.item(), samples))
                samples = []
    return steps


@pytest.mark.parametrize("clear", ["first", "last"])
@pytest.mark.parametrize("passes", [1, 3])
@pytest.mark.parametrize("world_size", [1, 3])
def test_several_backward_passes_of_several_micro_batches_add_up(world_size: int, passes: int, clear: str) -> None:
    """As in a GAN's discriminator: the gradient of each pass is the mean over the whole global batch."""
    results = run_ranks(accumulate, world_size, passes, clear)
    assert len({len(result) for result in results}) == 1
    sizes = set()
    for ranks in zip(*results, strict=True):
        batch = [sample for _, samples in ranks for sample in samples]
        sizes.add(len(batch))
        for moved, _ in ranks:
            assert moved == pytest.approx(passes * sum(batch) / len(batch), rel=1e-4)
    assert len(sizes) > 3


def accumulate_by_hand(style: str) -> list[float]:
    """The loop sums the gradients of two batches of the loader itself, as scripts do that know nothing of ours."""
    reset_core()
    torch.manual_seed(0)
    model = Perceptron()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = AdaptiveDataLoader(Points(), batch_size=10, shuffle=True)
    wrapped = AdaptiveDataParallel(model, optimizer, noise_every=2)
    for _ in remaining_epochs_until(2):
        for number, (x, y) in enumerate(loader):
            last = number % 2 == 1 or number == 6
            with contextlib.nullcontext() if last or style == "plain" else wrapped.no_sync():
                (nn.functional.cross_entropy(wrapped(x), y) / 2).backward()
            if last:
                optimizer.step()
                optimizer.zero_grad()
    assert wrapped.part.passes.user_accumulates
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()]).tolist()


def by_plain_torch() -> torch.Tensor:
    torch.manual_seed(0)
    model = Perceptron()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = Points()
    cursor = ElasticCursor(SAMPLES, shuffle=True)
    for _ in range(2):
        order = torch.tensor(cursor.order())
        for number in range(7):
            batch = order[number * 10 : (number + 1) * 10]
            (nn.functional.cross_entropy(model(data.x[batch]), data.y[batch]) / 2).backward()
            if number % 2 == 1 or number == 6:
                optimizer.step()
                optimizer.zero_grad()
        cursor.end_pass()
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


@pytest.mark.parametrize("style", ["no_sync", "plain"])
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_loop_may_accumulate_by_itself(world_size: int, style: str) -> None:
    expected = by_plain_torch()
    for weights in run_ranks(accumulate_by_hand, world_size, style):
        torch.testing.assert_close(torch.tensor(weights), expected, rtol=1e-4, atol=1e-6)


class EitherWay(nn.Module):
    """Two layers, of which either comes first."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other, self.turned = nn.Linear(3, 3), nn.Linear(3, 3), False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, second = (self.other, self.one) if self.turned else (self.one, self.other)
        output: torch.Tensor = second(torch.tanh(first(x)))
        return output


def layouts_by_group() -> list[str | None]:
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    model = EitherWay()
    wrapped = nn.parallel.DistributedDataParallel(model)
    layouts = []
    for group in range(4):
        model.turned = bool(group % 2)
        replace_process_group(wrapped, dist.new_group([0]))
        for _ in range(12):
            wrapped(torch.ones(2, 3)).sum().backward()
        layouts.append(layout_of_buckets(wrapped))
    return layouts


def test_where_gradients_lie_is_told_as_it_is_in_each_group() -> None:
    """Torch lays buckets out anew in each group, and its log looks in a few early steps only."""
    [[first, turned, *again]] = run_ranks(layouts_by_group, 1)
    assert first != turned
    assert again == [first, turned]


def heard_while_one_is_late() -> list[str]:
    words: list[str] = []
    hear(words)
    bucket_reducer.LONG_SECONDS = 0.05
    model = Perceptron()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = AdaptiveDataLoader(Points(), batch_size=10)
    wrapped = AdaptiveDataParallel(model, optimizer)
    for _ in remaining_epochs_until(1):
        for x, y in loader:
            if get_core().generation.group.rank == 1:
                time.sleep(0.3)
            optimizer.zero_grad()
            nn.functional.cross_entropy(wrapped(x), y).backward()
            optimizer.step()
    return [each for each in words if "in a model's forward pass" in each]


def test_a_replica_that_waits_long_in_a_forward_pass_says_so() -> None:
    first, _ = run_ranks(heard_while_one_is_late, 2)
    assert first
