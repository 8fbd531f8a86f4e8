"""Replicas that do not train one model, or do not read one stream, are noticed within a few steps and told by name."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import IterableDataset

import dist_core
from dist_core.data.source import checksum_of
from dist_core.trial.same_weights import ROUNDING, _difference
from tests.support import habits
from tests.support.habits import GROWN, PAIR, Kit, as_trial, examples, in_plain_pytorch, network, weights_of
from tests.support.ranks import run_ranks
from tests.support.shared_habits import mse

Change = Callable[[Any, torch.optim.Optimizer], None]


def trained(
    kit: Kit, change: Change, *, epochs: int = 3, model: nn.Module | None = None, **options: Any
) -> list[float]:
    """``change``: what the script does between ``backward()`` and ``step()``."""
    model = model or network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    loader, wrapped = kit.loader(examples()), kit.wrap(model, optimizer, **(options if kit.elastic else {}))
    for _ in kit.epochs(epochs):
        for x, y in loader:
            optimizer.zero_grad()
            mse(wrapped(x), y).backward()
            change(model, optimizer)
            optimizer.step()
    return weights_of(model)


def noisy(model: Any, optimizer: torch.optim.Optimizer) -> None:
    for parameter in model.parameters():
        parameter.grad += 0.1 * torch.randn_like(parameter)


def draws_in_its_updates(kit: Kit) -> list[float]:
    return trained(kit, noisy)


def draws_and_is_put_right(kit: Kit) -> list[float]:
    return trained(kit, noisy, on_divergence="resync")


def loads_its_own_weights(kit: Kit) -> list[float]:
    def change(model: Any, optimizer: torch.optim.Optimizer) -> None:
        if kit.elastic and dist_core.rank() == 1:
            with torch.no_grad():
                model[0].bias += 1.0

    return trained(kit, change)


def accumulates_by_its_own_counter(kit: Kit) -> list[float]:
    """An iterator's place is no variable that others could be given."""
    habits.GROW_AT = 2
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    loader, wrapped, counts = kit.loader(examples()), kit.wrap(model, optimizer), itertools.count(1)
    for _ in kit.epochs(4):
        for x, y in loader:
            (mse(wrapped(x), y) / 3).backward()
            if next(counts) % 3 == 0:
                optimizer.step()
                optimizer.zero_grad()
    return weights_of(model)


class ActNorm(nn.Module):
    """Sets its weights by the first batch that it sees, as in Glow."""

    is_set: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.shift, self.scale = nn.Parameter(torch.zeros(6)), nn.Parameter(torch.ones(6))
        self.register_buffer("is_set", torch.zeros((), dtype=torch.bool))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.is_set:
            with torch.no_grad():
                self.shift.copy_(x.mean(0))
                self.scale.copy_(1.0 / x.std(0))
                self.is_set.fill_(True)
        return (x - self.shift) * self.scale


def sets_its_weights_by_its_first_batch(kit: Kit) -> tuple[list[float], list[str]]:
    words: list[str] = []
    habits.hear(words)
    weights = trained(kit, lambda *_: None, model=nn.Sequential(ActNorm(), network()))
    return weights, [each for each in words if "sets its weights" in each or "go on with rank 0's" in each]


@pytest.mark.parametrize(
    ("replicas", "passes", "warns"), [(1, 1, False), (1, 3, True), (2, 1, True), (GROWN, 1, False)]
)
def test_weights_that_the_first_forward_pass_sets_are_rank_0s_everywhere(
    replicas: int, passes: int, warns: bool
) -> None:
    expected, _ = in_plain_pytorch(sets_its_weights_by_its_first_batch)
    (first, words), *others = as_trial(sets_its_weights_by_its_first_batch, replicas, passes)
    assert len(words) == warns
    assert first == pytest.approx(expected, abs=1.0 if warns else 1e-5)
    for weights, _ in others:
        assert weights == pytest.approx(first, abs=1e-6)


@pytest.mark.parametrize(
    ("habit", "world"),
    [(draws_in_its_updates, 2), (draws_in_its_updates, PAIR), (loads_its_own_weights, 3)],
)
def test_replicas_that_hold_different_models_are_told_by_the_parameters_name(habit: Any, world: int) -> None:
    with pytest.raises(AssertionError, match=r"models are no longer equal: the parameter '\d\.\w+' differs by"):
        as_trial(habit, world)


def test_a_joiner_whose_counter_began_anew_is_noticed() -> None:
    with pytest.raises(AssertionError, match="a count of its own, which a replica that joined later may have begun"):
        as_trial(accumulates_by_its_own_counter, GROWN)


def test_who_asked_for_it_goes_on_from_rank_0s_weights() -> None:
    """After each look all have rank 0's; what is drawn after the last one is each replica's own."""
    first, second = as_trial(draws_and_is_put_right, 2)
    apart = max(abs(one - other) for one, other in zip(first, second, strict=True))
    # One update's noise, and not that of all twelve.
    assert apart < 0.05


class Augmented(IterableDataset[Any]):
    """Shuffles and changes its samples by numbers that it draws from all three global generators."""

    def __init__(self, by_rank: bool = False) -> None:
        self._rows = [examples()[index] for index in range(96)]
        self._by_rank = by_rank

    def __iter__(self) -> Iterator[Any]:
        order = list(range(len(self._rows)))
        random.shuffle(order)
        if self._by_rank and dist.is_initialized():
            order = order[dist.get_rank() :: dist.get_world_size()]
        for index in order:
            x, y = self._rows[index]
            yield x + 0.01 * torch.randn(6) + 0.01 * np.random.randn(), y


def streamed(kit: Kit, by_rank: bool) -> int:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    loader, wrapped, seen = kit.loader(Augmented(by_rank)), kit.wrap(model, optimizer), 0
    for _ in kit.epochs(2):
        for x, y in loader:
            optimizer.zero_grad()
            mse(wrapped(x), y).backward()
            optimizer.step()
            seen += len(x)
    return seen


def reads_one_stream(kit: Kit) -> int:
    return streamed(kit, False)


def reads_a_part_of_its_own(kit: Kit) -> int:
    return streamed(kit, True)


def test_a_stream_that_shuffles_and_augments_is_the_same_for_all_replicas() -> None:
    assert in_plain_pytorch(reads_one_stream) == 192
    assert as_trial(reads_one_stream, 1) == [192]
    assert sum(as_trial(reads_one_stream, 2)) == 192
    assert sum(as_trial(reads_one_stream, 3)) == 192


def test_a_stream_that_divides_itself_is_refused() -> None:
    with pytest.raises(AssertionError, match="the replicas read different samples from the iterable dataset"):
        as_trial(reads_a_part_of_its_own, 2)


def test_a_difference_is_measured_by_the_size_of_the_weights() -> None:
    assert _difference([[1.0, 2.0], [1.0, 2.0]]) == (0.0, 0.0)
    spread, relative = _difference([[100.0, 100.0], [100.0, 100.001]])
    assert spread == pytest.approx(0.001) and relative < ROUNDING
    assert _difference([[1.0], [2.0]])[1] > ROUNDING
    assert _difference([[math.nan], [math.nan]]) == (0.0, 0.0)
    assert _difference([[math.nan, 1.0], [1.0, 1.0]])[0] == math.inf


def test_a_samples_checksum_is_that_of_its_content() -> None:
    sample: dict[str, Any] = {
        "x": torch.arange(4.0),
        "y": [1, "a", None],
        "z": np.arange(3),
        "b": torch.ones(2, dtype=torch.bfloat16),
    }
    again = {"x": torch.arange(4.0), "y": [1, "a", object()], "z": np.arange(3), "b": sample["b"].clone()}
    assert checksum_of(sample) == checksum_of(again)
    assert len({checksum_of(each) for each in (sample, torch.arange(4.0), torch.arange(5.0), (1, 2), "a", b"a")}) == 6


# ------- buffers that a forward pass changes and computes with, such as a codebook: one on all replicas, as under DDP


class Codebook(nn.Module):
    """Vectors that follow the inputs that are next to them; a cache of what one replica has seen."""

    codes: torch.Tensor
    cache: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.encoder, self.decoder = nn.Linear(6, 4), nn.Linear(4, 1)
        self.register_buffer("codes", torch.randn(5, 4))
        self.register_buffer("cache", torch.zeros(0), persistent=False)
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        encoded = self.norm(self.encoder(x))
        nearest = torch.cdist(encoded, self.codes).argmin(1)
        quantized = self.codes[nearest]
        if self.training:
            self.cache = torch.zeros(int(x.abs().sum() * 100) % 7)
            with torch.no_grad():
                for index, row in zip(nearest.tolist(), encoded, strict=True):
                    self.codes[index].lerp_(row, 0.1)
        out: torch.Tensor = self.decoder(encoded + (quantized - encoded).detach())
        return out


def quantizes(kit: Kit) -> list[list[float]]:
    """The codes that each step of the last epoch begins with, and the weights it ends with."""
    model = Codebook()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    loader, wrapped = kit.loader(examples()), kit.wrap(model, optimizer)
    codes: list[list[float]] = []
    for _ in kit.epochs(3):
        codes = []
        for x, y in loader:
            codes.append(model.codes.flatten().tolist())
            optimizer.zero_grad()
            nn.functional.mse_loss(wrapped(x), y).backward()
            optimizer.step()
    return [*codes, weights_of(model)]


def one_step(kit_is_elastic: bool) -> list[list[float]]:
    return quantizes(Kit(elastic=kit_is_elastic))


@pytest.mark.parametrize("replicas", [2, GROWN])
def test_all_replicas_compute_with_the_same_codes_at_each_step(replicas: int) -> None:
    first, *others = as_trial(quantizes, replicas)
    assert len({tuple(codes) for codes in first[:-1]}) == len(first) - 1, "the codes have not moved"
    assert all(other == first for other in others)


def test_alone_nothing_is_sent() -> None:
    [alone] = run_ranks(one_step, 1, True)
    [plain] = run_ranks(one_step, 1, False)
    assert alone == plain
