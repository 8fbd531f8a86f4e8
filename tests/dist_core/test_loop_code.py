"""What is read from the code around a loop over batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from dist_core.training.loop_code import counts_by_enumerate, sum_over_uncounted_samples
from tests.support.habits import Habit, Kit, as_trial, examples, hear, in_plain_pytorch, network

SAMPLES = torch.ones(4)
LIBRARY = """
def batches(looks, look):
    looks.append(look())
    yield samples
    looks.append(look())
"""


def batches(looks: list[Any], look: Callable[[], Any]) -> Iterator[torch.Tensor]:
    """Stand in for a loader, whose own frames are not the user's; asked for each batch, it looks."""
    library: dict[str, Any] = {"__name__": "dist_core.loader", "samples": SAMPLES}
    exec(LIBRARY, library)
    found: Iterator[torch.Tensor] = library["batches"](looks, look)
    return found


def test_a_count_by_enumerate_is_known_where_it_is_used() -> None:
    looks: list[bool] = []
    for index, _ in enumerate(batches(looks, counts_by_enumerate)):
        assert index == 0
    for unused, _ in enumerate(batches(looks, counts_by_enumerate)):  # noqa: B007
        pass
    for _ in batches(looks, counts_by_enumerate):
        pass
    assert looks == [True, True, False, False, False, False]


def of_losses(looks: list[Any]) -> None:
    total = 0.0
    for x in batches(looks, sum_over_uncounted_samples):
        loss = x.mean()
        total += loss.item() * x.size(0)


def of_right_answers_in_a_dictionary(looks: list[Any]) -> None:
    found = {"right": 0.0}
    for _, x in enumerate(batches(looks, sum_over_uncounted_samples)):
        found["right"] += (x == 1.0).sum().item()


def with_their_number(looks: list[Any]) -> None:
    total = seen = 0.0
    for x in batches(looks, sum_over_uncounted_samples):
        total += x.mean().item() * x.shape[0]
        seen += x.shape[0]


def of_losses_that_are_sums(looks: list[Any]) -> Any:
    total, loader = 0.0, DataLoader(TensorDataset(SAMPLES))
    for x in batches(looks, sum_over_uncounted_samples):
        total += x.sin()[0].item()
    return total / len(loader.dataset)  # type: ignore[arg-type]  # it has one


def of_batches(looks: list[Any]) -> None:
    total = 0.0
    for x in batches(looks, sum_over_uncounted_samples):
        total += x.mean().item()


def of_each_batch_anew(looks: list[Any]) -> None:
    for x in batches(looks, sum_over_uncounted_samples):
        penalty = 0.0
        for weight in (x, x):
            penalty += weight.abs().sum().item()


@pytest.mark.parametrize(
    ("loop", "found"),
    [
        (of_losses, "total"),
        (of_right_answers_in_a_dictionary, "right"),
        (of_losses_that_are_sums, "total"),
        (with_their_number, None),
        (of_batches, None),
        (of_each_batch_anew, None),
    ],
)
def test_sums_over_samples_are_known_where_the_body_does_not_count_them(
    loop: Callable[[list[Any]], Any], found: str | None
) -> None:
    looks: list[Any] = []
    loop(looks)
    assert looks == [found, found]


def mean_losses(kit: Kit) -> list[float]:
    """Each epoch's mean loss, as PyTorch's first tutorial has it."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    loader, wrapped = kit.loader(examples()), kit.wrap(model, optimizer)
    means = []
    for _ in kit.epochs(2):
        assert len(loader) == 4
        total = 0.0
        for x, y in loader:
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(wrapped(x), y)
            loss.backward()
            optimizer.step()
            total += loss.item()
        means.append(total / len(loader))
        assert len(loader) == 4
    return means


@pytest.mark.parametrize("passes", [1, 3])
def test_a_mean_over_batches_is_one_over_those_that_the_body_was_given(passes: int) -> None:
    assert as_trial(mean_losses, 1, passes) == [pytest.approx(in_plain_pytorch(mean_losses), rel=1e-5)]


def until_ten(kit: Kit, *, counts_steps: bool) -> list[str]:
    """What the trial warns of, where the loop ends by a count of its own."""
    words: list[str] = []
    hear(words)
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    loader, wrapped = kit.loader(examples()), kit.wrap(model, optimizer)
    step = 0
    for _ in kit.epochs(4):
        for x, y in loader:
            nn.functional.mse_loss(wrapped(x), y).backward()
            optimizer.step()
            step += not counts_steps or wrapped.is_last_micro_batch
            if step >= 10:
                return words
    return words


def by_batches(kit: Kit) -> list[str]:
    return until_ten(kit, counts_steps=False)


def by_steps(kit: Kit) -> list[str]:
    return until_ten(kit, counts_steps=True)


@pytest.mark.parametrize(
    ("ends", "passes", "is_told"), [(by_batches, 1, False), (by_batches, 2, True), (by_steps, 2, False)]
)
def test_a_loop_that_is_left_by_a_count_of_passes_is_told_of(ends: Habit, passes: int, is_told: bool) -> None:
    [words] = as_trial(ends, 1, passes)
    said = "left where 'step', its count of batches, is 10, but they are worth 5 of the script's"
    assert [said in each for each in words if "count of batches, is" in each] == [True] * is_told
