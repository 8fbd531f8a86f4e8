"""Which reduction is kept, and what strategies refuse."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dist_core import AdaptiveDataParallel
from dist_core.errors import InvalidTraining
from dist_core.gradients.choice import ROUNDS, SKIPPED_STEPS, TIMED_STEPS, Tuner
from dist_core.gradients.reduce import reduction_strategy
from dist_core.trial.current import get_core
from tests.support.perceptrons import Perceptron, train
from tests.support.ranks import run_ranks


def tuned(batch: int) -> tuple[list[float], dict[str, int]]:
    weights = train("perceptron", ["all_reduce", "round_robin", "sharded"], batch, bucket_cap_mb="auto")
    return weights, get_core().registry.capture()["model-0"]["tuned"]


@pytest.mark.slow
def test_tuning_tries_all_on_all_replicas_and_changes_no_result(alone: Any) -> None:
    """Nine candidates in 3 rounds of 9 steps need 243 steps; batches of one sample give 210: every one is tried."""
    expected = alone("perceptron", batch=1)
    results = run_ranks(tuned, 2, 1)
    for weights, _ in results:
        torch.testing.assert_close(torch.tensor(weights), expected, rtol=1e-3, atol=1e-5)


def settled() -> tuple[list[float], dict[str, int]]:
    weights = train("perceptron", ["all_reduce", "round_robin"], 1)
    return weights, get_core().registry.capture()["model-0"]["tuned"]


def test_replicas_settle_on_what_rank_0_found() -> None:
    results = run_ranks(settled, 2)
    assert results[0][1] == results[1][1]
    assert set(results[0][1]) == {"1x2"}


def test_options_that_do_not_exist_are_refused_in_words() -> None:
    with pytest.raises(InvalidTraining, match="'all_reduce' was given options it does not have"):
        reduction_strategy("all_reduce", num_groups=2)
    with pytest.raises(InvalidTraining, match="num_groups of round_robin is 0"):
        reduction_strategy("round_robin", num_groups=0)
    with pytest.raises(InvalidTraining, match="matrix_rank=0"):
        reduction_strategy("power_sgd", matrix_rank=0)
    model = Perceptron()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(InvalidTraining, match="choose it alone"):
        AdaptiveDataParallel(model, optimizer, reduction=["all_reduce", "power_sgd"])
    with pytest.raises(InvalidTraining, match="given process_group="):
        AdaptiveDataParallel(Perceptron(), torch.optim.SGD([torch.zeros(1)], lr=0.1), process_group=None)


def tune_through(tuner: Tuner, times: list[float]) -> int | None:
    for _ in range(ROUNDS * len(times) * (SKIPPED_STEPS + TIMED_STEPS)):
        tuner.timed(times[tuner.candidate])
        tuner.advance()
    return tuner.proposal


def test_the_first_candidate_stays_unless_another_is_clearly_faster() -> None:
    for times, winner in (([1.0, 0.99], 0), ([1.0, 0.9], 1), ([1.0, 1.5, 0.5], 2)):
        tuner = Tuner(len(times))
        tuner.enter(4, 1)
        assert tune_through(tuner, times) == winner


def test_what_was_found_for_a_size_holds_when_it_comes_again() -> None:
    tuner = Tuner(2)
    tuner.enter(4, 1)
    assert tune_through(tuner, [1.0, 0.5]) == 1
    tuner.settle(1)
    tuner.enter(2, 1)
    assert (tuner.settled, tuner.candidate) == (False, 0)
    tuner.enter(4, 1)
    assert (tuner.settled, tuner.candidate) == (True, 1)
    other = Tuner(2)
    other.load_state_dict(tuner.state_dict())
    other.enter(4, 1)
    assert other.candidate == 1
