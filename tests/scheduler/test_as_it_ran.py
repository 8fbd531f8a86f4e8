"""What a recorded scheduler did with its slots: idle time and changes that were taken back."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from dist_core.goodput import BatchBounds, ThroughputParams
from scheduler.simulator.application import ModelledApplication
from scheduler.simulator.as_it_ran import RanTrial, as_it_ran
from trials.record import Reason, ReplicaRecord, ReplicaState, TrialRecord
from trials.spec import TrialSpec
from trials.states import TrialState
from trials.store.base import HistoryEntry

GROWS = ModelledApplication(
    name="grows",
    bounds=BatchBounds(init_batch=128, max_batch=4096, min_atomic=32, max_atomic=1024),
    params=ThroughputParams(0.03, 0.0002, 0.08, 0.002, 0.02, 0.002, 1.6),
    epochs=10,
    steps_per_epoch=100.0,
)


def trial(
    *, ends: float, sizes: Sequence[tuple[float, str, str]], slots: Sequence[tuple[int, float, float, float]]
) -> RanTrial:
    """``sizes``: (time, what, reason's code) of its history; ``slots``: (slot, launched, ready, gone)."""
    return RanTrial(
        name="s/0",
        record=TrialRecord(
            trial_id="a",
            spec=TrialSpec(study="s", number=0, entrypoint="m:f", max_replicas=4),
            state=TrialState.SUCCEEDED,
            finished_at=ends,
        ),
        application=GROWS,
        history=[
            HistoryEntry(at=at, trial_id="a", what=what, reason=Reason(code=code, sentence=""))
            for at, what, code in sizes
        ],
        replicas=[
            ReplicaRecord(
                replica_id=f"a-{index}",
                trial_id="a",
                node="n",
                slot=slot,
                launch_index=index,
                state=ReplicaState.GONE,
                launched_at=launched,
                ready_at=ready,
                gone_at=gone,
            )
            for index, (slot, launched, ready, gone) in enumerate(slots)
        ],
        pause_seconds=1.0,
    )


def test_slots_are_idle_while_nobody_trains_on_them_although_somebody_could() -> None:
    alone = trial(
        ends=20.0,
        sizes=[(2.0, "running", "trains"), (4.0, "1 -> 4 replicas", "more"), (10.0, "running", "trains")],
        slots=[(0, 0.0, 1.0, 20.0), *((slot, 5.0, 6.0, 20.0) for slot in (1, 2, 3))],
    )
    ran = as_it_ran([alone], now=20.0)
    # Two seconds until the first one trains, and ten until the three others do.
    assert ran.idle_share == pytest.approx((2.0 + 3 * 10.0) / 80.0)
    assert (ran.slots, ran.makespan_seconds, ran.rescales, ran.undone) == (4, 20.0, 1, 0)
    assert "40.0% of the slot time idle" in ran.sentence
    assert ran.trained == [(2.0, {"s/0": 1}), (10.0, {"s/0": 4}), (20.0, {})]
    assert ran.completion_seconds == {"s/0": 20.0}


def test_a_replica_that_never_came_to_train_was_idle() -> None:
    both = [(0, 0.0, 0.0, 10.0), (1, 2.0, 3.0, 10.0)]
    ran = as_it_ran([trial(ends=10.0, sizes=[(0.0, "running", "trains")], slots=both)], now=10.0)
    assert ran.idle_share == pytest.approx(0.5)


def test_what_a_trial_takes_back_before_it_has_paid_for_itself_is_counted() -> None:
    flaps = [(1.0, "1 -> 2 replicas", "more"), (1.5, "2 -> 1 replicas", "less"), (60.0, "1 -> 2 replicas", "more")]
    lost = (61.0, "2 -> 1 replicas", "replica_lost")
    ran = as_it_ran([trial(ends=90.0, sizes=[*flaps, lost], slots=[(0, 0.0, 0.0, 90.0)])], now=90.0)
    assert (ran.rescales, ran.undone) == (3, 1)
