from __future__ import annotations

import random
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from dist_core.state.random_streams import RandomStreams, seeded
from dist_core.state.seeds import derived_seed, seed_all


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    with seeded(0):
        yield


def draw() -> tuple[float, float, float]:
    return random.random(), float(np.random.rand()), float(torch.rand(()))


def test_a_state_repeats_what_comes_next() -> None:
    streams = RandomStreams()
    saved = streams.state_dict()
    first = draw()
    streams.load_state_dict(saved)
    assert draw() == first


def test_rank_0_goes_on_with_its_own_streams_whatever_the_generation() -> None:
    seed_all(5)
    expected = draw()
    seed_all(5)
    streams = RandomStreams()
    streams.entered(0, 1)
    streams.entered(0, 2)
    assert draw() == expected


def test_other_ranks_draw_what_follows_from_seed_rank_and_generation() -> None:
    seed_all(5)
    of_rank_0 = RandomStreams()
    state = of_rank_0.state_dict()
    drawn: dict[tuple[int, int], tuple[float, float, float]] = {}
    for rank, generation in [(1, 1), (2, 1), (1, 2), (1, 1)]:
        seed_all(99)
        streams = RandomStreams()
        streams.load_state_dict(state)
        streams.entered(rank, generation)
        values = draw()
        assert drawn.setdefault((rank, generation), values) == values
    seed_all(5)
    assert len({*drawn.values(), draw()}) == 4


def test_a_state_of_another_rank_brings_the_seed_alone() -> None:
    seed_all(5)
    state = RandomStreams().state_dict()
    streams = RandomStreams()
    streams.entered(1, 3)
    before = torch.get_rng_state()
    streams.load_state_dict(state)
    assert torch.equal(torch.get_rng_state(), before)
    assert streams.seed == state["seed"] == 5


def test_what_is_drawn_within_does_not_disturb_what_is_drawn_after() -> None:
    seed_all(3)
    expected = draw()
    seed_all(3)
    with seeded(8):
        inside = draw()
    with seeded(8):
        assert draw() == inside
    assert draw() == expected


def test_seeds_differ_by_every_part() -> None:
    assert len({derived_seed(1, 2, 3), derived_seed(1, 3, 2), derived_seed(12, 3), derived_seed(1, 23)}) == 4
