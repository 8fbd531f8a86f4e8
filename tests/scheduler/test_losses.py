"""Restart or failure: what follows a loss, by exit status, past losses and progress."""

from __future__ import annotations

import signal

import pytest

from dist_core.errors import EXIT_PEER_LOST
from scheduler.loop.losses import LONGEST_BACKOFF_SECONDS, MOST_CRASHES, judge


@pytest.mark.parametrize("status", [-signal.SIGKILL, -signal.SIGTERM, None, 0, EXIT_PEER_LOST])
def test_what_came_from_outside_is_restarted_without_limit_while_the_trial_gets_on(status: int | None) -> None:
    losses = 0
    for _ in range(50):
        verdict = judge({status}, "", losses=losses, max_losses=5, progressed=True)
        assert not verdict.gives_up
        losses = verdict.losses
    assert losses == 1


@pytest.mark.parametrize(
    ("status", "most", "code"), [(-signal.SIGKILL, 6, "lost_too_often"), (3, MOST_CRASHES, "crashed")]
)
def test_losses_without_progress_back_off_and_end(status: int, most: int, code: str) -> None:
    losses, waits = 0, []
    for _ in range(most - 1):
        verdict = judge({status}, "boom", losses=losses, max_losses=5, progressed=False)
        assert not verdict.gives_up
        losses = verdict.losses
        waits.append(verdict.wait_seconds)
    assert waits[0] == 0.0 and waits == sorted(set(waits))
    last = judge({status}, "boom", losses=losses, max_losses=5, progressed=False)
    assert (last.gives_up, last.reason.code, last.losses) == (True, code, most)


def test_a_crash_says_what_the_process_said_last() -> None:
    verdict = judge({1}, "ModuleNotFoundError: No module named 'x'", losses=0, max_losses=5, progressed=False)
    assert verdict.reason.sentence == (
        "its replicas ended with exit status 1 before they returned a value: "
        "\"ModuleNotFoundError: No module named 'x'\"; restart 1 of 3, from its last checkpoint"
    )
    assert "SIGSEGV" in judge({-signal.SIGSEGV}, "", losses=0, max_losses=5, progressed=False).reason.sentence


def test_no_restarts_allowed_means_the_first_loss_ends_it() -> None:
    assert judge({-9}, "", losses=0, max_losses=0, progressed=True).gives_up
    assert judge({1}, "", losses=0, max_losses=0, progressed=True).gives_up


def test_the_wait_has_an_end() -> None:
    verdict = judge({None}, "", losses=40, max_losses=100, progressed=False)
    assert verdict.wait_seconds == LONGEST_BACKOFF_SECONDS
