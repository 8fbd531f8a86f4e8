"""Who evaluates what: a script that knows of one process has all samples on each replica, others have shares."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest

from dist_core import Accumulator
from tests.support.habits import PAIR, Kit, as_trial, hear, in_plain_pytorch
from tests.support.plain_evaluation import counted_while_training, summed_in_secret, summed_while_training, trained


def with_an_accumulator(kit: Kit) -> tuple[list[float], list[str]]:
    words: list[str] = []
    hear(words)
    return trained(kit, Accumulator()), words


def with_a_secret_collective(kit: Kit) -> tuple[list[float], list[str]]:
    words: list[str] = []
    hear(words)
    return summed_in_secret(kit), words


def with_its_words(train: Callable[[Kit], list[float]], kit: Kit) -> tuple[list[float], list[str]]:
    words: list[str] = []
    hear(words)
    return train(kit), [word for word in words if "does not count them" in word]


@pytest.mark.parametrize("replicas", [1, 2, PAIR])
def test_a_script_that_knows_of_one_process_evaluates_as_it_does_alone(replicas: int) -> None:
    expected = in_plain_pytorch(trained)
    assert as_trial(trained, replicas) == [pytest.approx(expected)] * abs(replicas)


def test_a_share_that_is_added_to_no_accumulator_is_told_of() -> None:
    for _, words in as_trial(with_an_accumulator, 2):
        assert [word for word in words if "its numbers are of one share" in word]


def test_a_collective_that_nothing_has_told_of_is_told_of_and_shares_what_follows() -> None:
    first, second = in_plain_pytorch(summed_in_secret)
    for sums, words in as_trial(with_a_secret_collective, PAIR):
        assert sums == pytest.approx([2 * first, second])
        assert len([word for word in words if "counts each of them several times" in word]) == 1


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_sum_over_samples_in_training_is_told_of_where_it_is_of_one_replicas(replicas: int) -> None:
    counted = as_trial(functools.partial(with_its_words, counted_while_training), replicas)
    summed = as_trial(functools.partial(with_its_words, summed_while_training), replicas)
    assert not any(words for _, words in counted)
    for (mean, _), (loss, words) in zip(counted, summed, strict=True):
        assert loss == pytest.approx([each / replicas for each in mean])
        assert len(set(words)) == (replicas > 1)
