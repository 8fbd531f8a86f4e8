"""Where joiners aim: neither at an epoch that is over before they come, nor at one that they wait for."""

from __future__ import annotations

import pytest

from dist_core.goodput import BatchBounds, Hints
from scheduler.api.joining import DEFAULT_JOIN_SECONDS, ENTER_SECONDS, MARGIN, MOST_TRIALS, Joining, reachable_epoch

BOUNDS = BatchBounds(init_batch=64, max_batch=64)


def hints(fraction: float, epoch_seconds: float | None = 4.0) -> Hints:
    return Hints(bounds=BOUNDS, epoch=7, epoch_fraction=fraction, epoch_seconds=epoch_seconds)


@pytest.mark.parametrize(
    ("fraction", "age", "needs", "epoch"),
    [
        (0.5, 0.0, 1.9, 7),
        (0.5, 0.0, 2.1, 8),
        (0.5, 1.0, 1.1, 8),  # what was two seconds then is one now
        (0.5, 0.0, 6.1, 9),  # by then the next one is over, too
        (0.9, 3600.0, 0.5, 8),  # between two epochs it evaluates, for as long as it likes
        (1.0, 0.0, 0.0, 8),
    ],
)
def test_a_joiner_aims_at_the_first_epoch_that_lasts_until_it_comes(
    fraction: float, age: float, needs: float, epoch: int
) -> None:
    assert reachable_epoch(hints(fraction), age, needs) == epoch


@pytest.mark.parametrize(("fraction", "epoch"), [(0.4, 7), (0.5, 8)])
def test_before_an_epoch_was_timed_its_first_half_is_believed_to_last(fraction: float, epoch: int) -> None:
    assert reachable_epoch(hints(fraction, None), 0.0, 1000.0) == epoch


def test_a_trial_is_measured_by_its_slowest_joiner_of_late() -> None:
    joining = Joining()
    default = MARGIN * (DEFAULT_JOIN_SECONDS + ENTER_SECONDS)
    joining.note_hints("t", now=100.0)
    assert joining.aim("t", hints(1.0 - 1.01 * default / 4.0), now=100.0) == 7
    assert joining.aim("t", hints(1.0 - 0.99 * default / 4.0), now=100.0) == 8
    left = 1.0 - 1.01 * default / 4.0
    for seconds in (0.1, 3.0, 0.1):
        joining.note_ready("t", seconds)
    assert joining.aim("t", hints(left), now=100.0) == 8
    assert joining.aim("another", hints(left), now=100.0) == 7
    for _ in range(4):
        joining.note_ready("t", 0.1)
    assert joining.aim("t", hints(left), now=100.0) == 7
    assert joining.aim("t", hints(left), now=101.0) == 8


def test_nothing_is_known_of_a_trial_that_told_nothing() -> None:
    assert Joining().aim("t", None, now=0.0) == 0


def test_trials_that_were_not_heard_of_are_forgotten() -> None:
    joining = Joining()
    for number in range(MOST_TRIALS + 10):
        joining.note_ready(str(number), 1.0)
    assert len(joining._trials) == MOST_TRIALS
    assert "0" not in joining._trials


def test_processes_of_one_replica_follow_the_one_that_is_furthest() -> None:
    joining = Joining()
    for name in ("t-a", "t-b"):
        joining.note_asked("t", "t-a", 1)
        joining.note_stands("t", name, 1)
    assert not joining.is_behind("t", "t-b", "t-a")
    assert joining.attempt_after("t", "t-b") == 2
    joining.note_asked("t", "t-a", 2)
    assert joining.is_behind("t", "t-b", "t-a")
    joining.note_stands("t", "t-b", 2)
    assert not joining.is_behind("t", "t-b", "t-a")
    assert joining.attempt_after("t", "t-c") is None
    assert not joining.is_behind("another", "t-b", "t-a")
