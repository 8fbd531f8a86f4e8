"""The next event of a trial, from what is known of it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from scheduler.loop.backoff import Backoff
from scheduler.loop.lifecycle import next_event
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
