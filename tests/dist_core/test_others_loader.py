"""Loaders of torch's that a trainer was given: the elastic one in their place goes through the same samples."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, RandomSampler, Sampler, SequentialSampler

from dist_core.errors import InvalidTraining
from dist_core.training.loader import AdaptiveDataLoader
from dist_core.training.others_loop import elastic_like, order_of

NUMBERS: Any = torch.arange(12.0)


class Backwards(SequentialSampler):
    def __iter__(self) -> Iterator[int]:
        return reversed(range(len(NUMBERS)))


class EvenOnes(RandomSampler):
    def __iter__(self) -> Iterator[int]:
        return iter(range(0, len(NUMBERS), 2))

    def __len__(self) -> int:
        return len(NUMBERS) // 2


@pytest.mark.parametrize(
    "sampler",
    [
        RandomSampler(NUMBERS, replacement=True),
        RandomSampler(NUMBERS, num_samples=4),
        EvenOnes(NUMBERS),
        Backwards(NUMBERS),
    ],
    ids=lambda each: f"{type(each).__name__} of {len(each)}",
)
def test_a_sampler_of_its_own_order_stays(sampler: Sampler[int]) -> None:
    """Though it is of a class that makes an order of all samples."""
    assert order_of(DataLoader(NUMBERS, 2, sampler=sampler)) == {"sampler": sampler}


def test_shuffles_are_the_trials_and_follow_their_generator() -> None:
    seeded = torch.Generator().manual_seed(5)
    shuffled = DataLoader(NUMBERS, 2, shuffle=True)
    drawn = DataLoader(NUMBERS, 2, sampler=RandomSampler(NUMBERS, generator=seeded))
    assert order_of(DataLoader(NUMBERS, 2)) == {}
    assert order_of(shuffled) == order_of(drawn) == {"shuffle": True}
    assert elastic_like(drawn, AdaptiveDataLoader, whom="fit").generator is seeded


class Doubled(DataLoader[Any]):
    def __iter__(self) -> Any:
        return (2 * batch for batch in super().__iter__())


class Filtered(DataLoader[Any]):
    """As the loaders of a graph's neighbours are made."""

    def _get_iterator(self) -> Any:
        return (2 * batch for batch in super()._get_iterator())


@pytest.mark.parametrize(("kind", "own"), [(Doubled, "__iter__"), (Filtered, "_get_iterator")])
def test_a_loader_that_changes_batches_is_refused(kind: type[DataLoader[Any]], own: str) -> None:
    sentence = f"fit was given a {kind.__name__}, whose own {own} would be ignored.*collate_fn"
    with pytest.raises(InvalidTraining, match=sentence):
        elastic_like(kind(NUMBERS, 2), AdaptiveDataLoader, whom="fit")
