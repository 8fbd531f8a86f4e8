"""Which trials will be trained to their end."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.knowledge.survival import Survival, rank_correlation

HALVED = Survival.of(stopped=[0.1] * 20, watched=[1.0] * 10 + [0.05] * 5)


def test_without_a_stop_everybody_goes_on() -> None:
    nobody = Survival.of([], [0.2, 1.0])
    assert nobody.probability(0.2, 0.01) == 1.0
    assert nobody.share_to_the_end(0.0) == 1.0


def test_the_share_is_that_of_those_who_were_there_to_be_stopped() -> None:
    # Thirty came that far, the five that are still before it say nothing; one imaginary one went on.
    assert HALVED.share_to_the_end(0.0) == pytest.approx(11 / 31)
    assert HALVED.share_to_the_end(0.1) == 1.0


def test_rank_decides_who_goes_on_the_more_the_later() -> None:
    chances = [HALVED.probability(0.05, quantile) for quantile in (0.05, 0.5, 0.95)]
    assert chances[0] < 0.05 < chances[1] < 0.5 < chances[2]
    assert HALVED.probability(0.001, 0.95) < chances[2]
    assert HALVED.probability(0.05, None) == HALVED.share_to_the_end(0.05)


def test_correlations_are_those_of_published_curves() -> None:
    for epoch, published in ((1, 0.74), (3, 0.84), (9, 0.91), (27, 0.98)):
        assert rank_correlation(epoch / 50) == pytest.approx(published, abs=0.05)


def test_who_will_be_stopped_stops_where_others_did() -> None:
    assert HALVED.part_until_stopped(0.0) == pytest.approx(0.1)
    assert HALVED.part_until_stopped(0.55) == pytest.approx(0.5)


parts = st.lists(st.floats(0.0, 1.0), max_size=12)


@given(parts, parts, st.floats(0.0, 1.0), st.none() | st.floats(0.01, 0.99))
def test_probabilities_are_probabilities(
    stopped: list[float], watched: list[float], fraction: float, quantile: float | None
) -> None:
    survival = Survival.of(stopped, watched)
    assert 0.0 <= survival.probability(fraction, quantile) <= 1.0
    assert 0.0 <= survival.part_until_stopped(fraction) <= 1.0
