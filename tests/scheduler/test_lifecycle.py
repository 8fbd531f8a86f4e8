"""The next event of a trial, from what is known of it."""

from __future__ import annotations

import signal
from dataclasses import replace
from typing import Any

import pytest

from dist_core.errors import EXIT_PEER_LOST
from scheduler.loop.backoff import Backoff
from scheduler.loop.lifecycle import next_event
from scheduler.loop.losses import LONGEST_BACKOFF_SECONDS, MOST_CRASHES, judge
from trials.record import Reason, ReplicaRecord, TrialRecord
from trials.spec import TrialSpec
from trials.states import TrialEvent, TrialState, next_state


def trial(state: TrialState, **changes: Any) -> TrialRecord:
    spec = TrialSpec(study="s", number=0, entrypoint="m:f")
    record = TrialRecord(trial_id="t", spec=spec, state=state, reason=Reason(code="c", sentence="s"), submitted_at=0.0)
    return replace(record, **changes)


def replica(name: str) -> ReplicaRecord:
    return ReplicaRecord(replica_id=name, trial_id="t", node="n", slot=0, launch_index=0)


A, B = replica("a"), replica("b")
SWITCHING = {"members": ("a",), "generation": 1, "published": 2, "published_members": ("a", "b")}
SETTLED = {"members": ("a",), "generation": 2, "published": 2, "published_members": ("a",)}


@pytest.mark.parametrize(
    ("state", "changes", "replicas", "reports", "expected"),
    [
        (TrialState.PENDING, {}, [], False, None),
        (TrialState.PENDING, {}, [A], False, TrialEvent.LAUNCHED),
        (TrialState.PAUSED, {}, [A], False, TrialEvent.LAUNCHED),
        (TrialState.STARTING, {}, [A], False, None),
        (TrialState.STARTING, {}, [A], True, TrialEvent.TRAINS),
        (TrialState.STARTING, {"published": 1, "published_members": ("a",)}, [A], True, None),
        (TrialState.STARTING, SETTLED, [A], False, TrialEvent.TRAINS),
        (TrialState.RUNNING, SETTLED, [A], False, None),
        (TrialState.RUNNING, SETTLED, [A, B], False, TrialEvent.RESCALE_BEGAN),
        (TrialState.RUNNING, SWITCHING, [A], False, TrialEvent.RESCALE_BEGAN),
        (TrialState.RUNNING, {}, [A, B], False, None),
        (TrialState.RESCALING, SETTLED, [A, B], False, None),
        (TrialState.RESCALING, SWITCHING, [A], False, None),
        (TrialState.RESCALING, SETTLED, [A], False, TrialEvent.RESCALE_ENDED),
    ],
)
def test_the_next_event_follows_from_facts(
    state: TrialState,
    changes: dict[str, Any],
    replicas: list[ReplicaRecord],
    reports: bool,
    expected: TrialEvent | None,
) -> None:
    found = next_event(trial(state, **changes), replicas, reports=reports)
    assert found is expected
    if found is not None:
        next_state(state, found)


def test_who_backs_off_is_left_alone_until_then() -> None:
    backoff = Backoff()
    backoff.begin("t", 10.0, 5.0)
    assert backoff.holds("t", 14.9)
    assert not backoff.holds("t", 15.0)
    assert not backoff.holds("other", 0.0)
    assert backoff.trials(12.0) == {"t"}
    assert backoff.trials(15.0) == set()
    backoff.forget("t")
    assert not backoff.holds("t", 11.0)


# ---------------------------------- restart or failure: what follows a loss, by exit status, past losses and progress


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
