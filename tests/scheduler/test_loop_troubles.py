"""The control loop in trouble: launches that hang, replicas that say nothing, policies that raise."""

from __future__ import annotations

from typing import Any

import pytest

from scheduler.loop.backoff import FAILED_JOIN_SECONDS
from scheduler.loop.executor import Executor
from scheduler.snapshot import Grant, Snapshot
from tests.support.loop_bench import Bench, grown
from trials.launch import NodeSlots
from trials.launch.base import NO_ROOM
from trials.record import Reason, ReplicaRecord, Study, TrialRecord
from trials.states import TrialState


def test_a_launch_that_hangs_keeps_nobody_waiting(bench: Bench) -> None:
    bench.launcher.hangs = True
    slow = bench.submit(max_replicas=1)
    bench.tick(3)
    (row,) = bench.store.replicas(trial_id=slow)
    assert row.pid is None
    assert bench.trial(slow).state is TrialState.STARTING
    bench.launcher.hangs = False
    bench.tick()
    (row,) = bench.store.replicas(trial_id=slow)
    assert row.pid is not None


def test_a_launch_that_hung_and_failed_is_tried_again(bench: Bench) -> None:
    bench.launcher.hangs = True
    trial_id = bench.submit(max_replicas=1)
    bench.tick(2)
    bench.launcher.hangs, bench.launcher.refuse = False, "no more processes"
    bench.tick()
    assert bench.store.replicas(trial_id=trial_id) == []
    assert "no more processes" in bench.trial(trial_id).reason.sentence
    bench.launcher.refuse = None
    bench.tick(10)
    assert [row.pid is not None for row in bench.store.replicas(trial_id=trial_id)] == [True]


def test_a_replica_that_was_to_stop_before_it_was_there_is_ended_when_it_is(bench: Bench) -> None:
    bench.launcher.hangs = True
    trial_id = bench.submit(max_replicas=1)
    bench.tick(2)
    bench.store.request_cancel(trial_id, "not wanted")
    bench.tick(2)
    assert bench.trial(trial_id).state is TrialState.CANCELLED
    bench.launcher.hangs = False
    bench.tick(2)
    assert bench.launcher.running == {}
    assert bench.store.replicas(trial_id=trial_id) == []


def test_a_replica_that_falls_silent_is_ended_and_a_clock_that_jumps_ends_nobody(bench: Bench) -> None:
    trial_id = bench.submit(min_replicas=2)
    bench.train(trial_id)
    replica, other = bench.store.replicas()
    bench.loop.liveness.note(replica.replica_id)
    bench.now += 3600.0
    bench.jumped += 3600.0
    for _ in range(25):
        bench.loop.liveness.note(other.replica_id)
        assert bench.launcher.stopped == []
        bench.tick(seconds=2.0)
        if bench.launcher.stopped:
            break
    assert bench.launcher.stopped == [(replica.replica_id, True)]
    [told] = [entry for entry in bench.store.history(trial_id) if entry.reason.code == "silent"]
    assert told.reason.sentence == f"replica {replica.replica_id} did not call for 45 s and was ended"


def test_a_silent_replica_that_is_alone_is_left_alone_and_told_of_once(bench: Bench) -> None:
    trial_id = bench.submit(max_replicas=1)
    bench.train(trial_id)
    [replica] = bench.store.replicas()
    bench.loop.liveness.note(replica.replica_id)
    bench.tick(100, seconds=2.0)
    assert bench.launcher.stopped == []
    [told] = [entry for entry in bench.store.history(trial_id) if entry.reason.code == "silent"]
    assert "is left running, because no other replica waits for it" in told.reason.sentence


def test_a_scheduler_that_was_held_up_ends_nobody_for_it(bench: Bench) -> None:
    bench.store.put_study(Study(name="s", owner="me", owner_seen_at=bench.now))
    trial_id = bench.submit()
    bench.train(trial_id)
    bench.tick()
    bench.now += 600.0
    bench.tick()
    bench.store.touch_study("s", "me", bench.now)
    bench.tick(20, seconds=0.9)
    assert bench.launcher.stopped == []
    assert bench.trial(trial_id).state is TrialState.RUNNING


def test_a_replica_that_hangs_while_the_scheduler_is_replaced_is_ended(bench: Bench) -> None:
    bench.train(bench.submit(min_replicas=2))
    bench.loop = bench.new_loop()
    bench.tick(20, seconds=2.0)
    assert bench.launcher.stopped == []
    bench.tick(5, seconds=2.0)
    assert [force for _, force in bench.launcher.stopped] == [True, True]


def test_slots_that_strangers_work_on_get_nothing_new(bench: Bench) -> None:
    bench.launcher.replace_nodes([NodeSlots(node="n0", slots=4, in_use=frozenset({0, 2}))])
    trials = [bench.submit(number, max_replicas=1) for number in range(4)]
    bench.tick(3)
    assert {replica.slot for replica in bench.store.replicas()} == {1, 3}
    bench.launcher.replace_nodes([NodeSlots(node="n0", slots=4, in_use=frozenset({1}))])
    bench.tick(3)
    assert {replica.slot for replica in bench.store.replicas()} == {0, 1, 2, 3}
    assert {bench.trial(trial_id).state for trial_id in trials} == {TrialState.STARTING}


def test_one_trial_that_cannot_be_handled_leaves_the_others_alone(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken, healthy = bench.submit(0), bench.submit(1)
    act_on = Executor.act_on

    def act(executor: Executor, trial: TrialRecord, *rest: Any) -> None:
        if trial.trial_id == broken:
            raise OverflowError("on purpose")
        act_on(executor, trial, *rest)

    monkeypatch.setattr(Executor, "act_on", act)
    bench.tick(3)
    assert bench.trial(healthy).state is TrialState.STARTING
    assert bench.trial(broken).state is TrialState.PENDING
    bench.tick(20)
    record = bench.trial(broken)
    assert (record.state, record.reason.code) == (TrialState.FAILED, "internal_error")
    assert "OverflowError: on purpose" in record.reason.sentence


def test_crashes_count_until_the_trial_gets_further_than_ever(bench: Bench) -> None:
    trial_id = bench.submit(max_replicas=1)
    for progress in (10.0, 9.0, 9.5, 8.0):
        bench.tick(60)
        bench.train(trial_id)
        bench.give_hints(trial_id, progress=progress)
        bench.tick()
        [name] = bench.launcher.running
        bench.launcher.end(name, 1)
        bench.tick()
    assert bench.trial(trial_id).reason.code == "crashed"


def test_replicas_that_others_left_no_room_for_are_tried_again_and_count_as_no_loss(bench: Bench) -> None:
    trial_id = bench.submit(max_replicas=1, max_losses=0)
    for _ in range(3):
        bench.tick(2)
        [replica] = bench.store.replicas()
        bench.launcher.end(replica.replica_id, None, "0/2 nodes are available: Insufficient gpu", NO_ROOM)
        bench.tick(2)
        record = bench.trial(trial_id)
        assert (record.state, record.losses) == (TrialState.PAUSED, 0)
        assert bench.store.replicas() == []
        assert "0/2 nodes are available" in bench.store.history(trial_id)[-1].reason.sentence
        bench.tick(int(FAILED_JOIN_SECONDS), seconds=1.0)
    bench.tick(2)
    bench.train(trial_id)
    assert bench.trial(trial_id).state is TrialState.RUNNING


def test_a_launch_that_fails_is_tried_again_later(bench: Bench) -> None:
    trial_id = bench.submit()
    bench.launcher.refuse = "no room on the disk"
    bench.tick()
    assert bench.trial(trial_id).state is TrialState.PENDING
    assert bench.store.replicas() == []
    bench.launcher.refuse = None
    bench.tick(10)
    assert bench.trial(trial_id).state is TrialState.STARTING


def test_a_policy_that_raises_changes_nothing(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    trial_id = grown(bench)
    before = bench.trial(trial_id)

    class Broken:
        name = "broken"

        def allocate(self, snapshot: Snapshot) -> dict[str, Grant]:
            raise RuntimeError("policy")

    bench.loop.decisions.policy = Broken()
    bench.tick(5)
    assert bench.trial(trial_id) == before
    assert len(bench.launcher.running) == 4
    assert "policy failed policy=broken" in caplog.text


@pytest.mark.parametrize("placement", [{"n0": 5}, {"n0": -1, "n1": 1}, {"nowhere": 1}])
def test_a_policy_that_grants_what_does_not_exist_changes_nothing(
    bench: Bench, caplog: pytest.LogCaptureFixture, placement: dict[str, int]
) -> None:
    trial_id = grown(bench)
    before = bench.trial(trial_id)

    class Generous:
        name = "generous"

        def allocate(self, snapshot: Snapshot) -> dict[str, Grant]:
            return {trial_id: Grant(placement=placement, reason=Reason(code="x", sentence="x"))}

    bench.loop.decisions.policy = Generous()
    bench.tick(5)
    assert bench.trial(trial_id) == before
    assert "was granted" in caplog.text


def test_a_row_without_a_process_does_not_keep_its_slot(bench: Bench) -> None:
    """What a scheduler leaves behind that was killed between writing the row and starting the process."""
    trial_id = bench.submit()
    bench.store.add_replica(
        ReplicaRecord(replica_id="ghost", trial_id=trial_id, node="n0", slot=0, launch_index=0, launched_at=bench.now)
    )
    bench.tick()
    assert [(row.slot, row.pid is not None) for row in bench.store.replicas()] == [(0, True)]
