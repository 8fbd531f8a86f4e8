"""Replicas of several slots: each on one node where that is large enough, all or none, whatever the policy."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler.allocation.whole_replicas import place_whole
from scheduler.api.joining import Joining
from scheduler.loop.executor import TornReplicas
from scheduler.policy import GoodputPolicy
from scheduler.policy.constrained import ConstrainedPolicy
from scheduler.simulator.rivals import compared_policy
from scheduler.snapshot import TrialView, check_grants
from tests.support.loop_bench import Bench
from tests.support.views import AT_ONCE, SEARCHES, model, running, snapshot, that_fit, views, waiting
from trials.errors import LaunchFailed
from trials.launch import InMemoryLauncher
from trials.record import Outcome, ReplicaRecord, TrialRecord
from trials.spec import TrialSpec
from trials.states import TrialState


def in_replicas_of(view: TrialView, size: int) -> TrialView:
    """The same trial, its counts in replicas of that size."""
    speed = None if view.model is None else replace(model(), slots_per_share=size)
    return replace(
        view,
        slots_per_replica=size,
        min_slots=size * view.min_slots,
        max_slots=size * view.max_slots,
        placement={node: count // size * size for node, count in view.placement.items() if count >= size},
        model=speed,
    )


@pytest.mark.parametrize("name", [*AT_ONCE, pytest.param(SEARCHES, marks=pytest.mark.slow)])
@settings(max_examples=80, deadline=None)
@given(
    trials=st.lists(st.tuples(views, st.integers(1, 4)), max_size=8, unique_by=lambda pair: pair[0].trial_id),
    nodes=st.integers(1, 4),
    slots=st.integers(1, 8),
    order=st.randoms(),
)
def test_every_policy_grants_whole_replicas(
    name: str, trials: list[tuple[TrialView, int]], nodes: int, slots: int, order: Any
) -> None:
    """Many snapshots under each policy, of which one searches for its answer."""
    policy = ConstrainedPolicy(compared_policy(name))
    kept = that_fit([in_replicas_of(view, size) for view, size in trials], slots)
    seen = snapshot(*kept, slots=slots, nodes=nodes)
    grants = policy.allocate(seen)
    check_grants(seen, grants)
    assert set(grants) == {view.trial_id for view in kept}
    for view in kept:
        assert not grants[view.trial_id].slots or view.held is None
        assert grants[view.trial_id].reason.sentence
    shuffled = list(kept)
    order.shuffle(shuffled)
    again = policy.allocate(replace(seen, trials=tuple(shuffled)))
    assert {key: grant.slots for key, grant in again.items()} == {key: grant.slots for key, grant in grants.items()}


@given(
    count=st.integers(0, 16),
    size=st.integers(1, 6),
    free=st.lists(st.integers(0, 8), min_size=1, max_size=5),
    held=st.integers(0, 8),
)
def test_slots_are_taken_in_whole_replicas_of_what_is_free(count: int, size: int, free: list[int], held: int) -> None:
    room = {f"n{index}": slots for index, slots in enumerate(free)}
    before = dict(room)
    placement = place_whole(count // size * size, size, room, {"n0": held}, max(1, *free))
    assert all(0 < taken <= before[node] for node, taken in placement.items())
    assert all(room[node] == before[node] - placement.get(node, 0) for node in room)
    assert sum(placement.values()) % size == 0 and sum(placement.values()) <= count
    if size <= max(1, *free):
        assert all(taken % size == 0 for taken in placement.values())
        possible = sum(slots // size for slots in free)
        assert sum(placement.values()) // size == min(count // size, possible)


def test_a_large_replica_gets_a_block_that_single_slots_make_room_for() -> None:
    small = [running(f"s{index}", placement={f"n{index}": 1}, max_slots=1) for index in range(2)]
    large = in_replicas_of(waiting("large", max_slots=1), 4)
    grants = ConstrainedPolicy(GoodputPolicy()).allocate(snapshot(*small, large, slots=4, nodes=2))
    assert sorted(grants["large"].placement.values()) == [4]
    assert all(grants[view.trial_id].slots == 1 for view in small)


def test_one_that_is_larger_than_a_node_takes_whole_nodes() -> None:
    large = in_replicas_of(waiting("large", max_slots=1), 8)
    grants = ConstrainedPolicy(GoodputPolicy()).allocate(snapshot(large, slots=4, nodes=3))
    assert sorted(grants["large"].placement.values()) == [4, 4]


def test_a_trial_grows_by_whole_replicas_and_says_what_it_lacks() -> None:
    policy = ConstrainedPolicy(GoodputPolicy())
    grows = in_replicas_of(running("a", 2, model=None), 2)
    grows = replace(grows, model=replace(model(), slots_per_share=2), placement={"n0": 2}, min_slots=2)
    assert policy.allocate(snapshot(grows, slots=7))["a"].slots == 6
    lacks = in_replicas_of(waiting("b", max_slots=1), 4)
    reason = policy.allocate(snapshot(lacks, slots=3, nodes=1))["b"].reason
    assert reason.sentence == "needs 4 slots, 4 on one node for each replica; the cluster has 3, 3 on its largest node"


def test_a_replica_is_started_whole_or_not_at_all(tmp_path: Path) -> None:
    bench = Bench(tmp_path, slots=5)
    trial_id = bench.submit(slots_per_replica=2, max_replicas=2)
    bench.tick()
    rows = bench.store.replicas(trial_id=trial_id)
    assert [row.launch_index for row in rows] == [0, 1]
    first, second = (bench.launcher.running[row.replica_id].environ for row in rows)
    assert first["ELASTUNE_WHOLE"] == second["ELASTUNE_WHOLE"] == rows[0].replica_id
    assert (first["ELASTUNE_MEMBER"], second["ELASTUNE_MEMBER"]) == ("0", "1")
    bench.train(trial_id)
    record = bench.trial(trial_id)
    assert record.members == tuple(row.replica_id for row in rows)
    # One of its processes ends: the other one is nobody's replica, and the trial starts again whole.
    bench.launcher.end(rows[1].replica_id, 1)
    bench.tick(30)
    rows = bench.store.replicas(trial_id=trial_id)
    assert len(rows) == 2 and not {row.replica_id for row in rows} & set(record.members)


def test_a_trial_of_two_replicas_of_two_goes_on_with_one(tmp_path: Path) -> None:
    bench = Bench(tmp_path, slots=4)
    trial_id = bench.submit(slots_per_replica=2, min_replicas=2, max_replicas=2)
    bench.train(trial_id)
    members = bench.trial(trial_id).members
    assert len(members) == 4
    bench.launcher.end(members[2], -9)
    bench.tick()
    assert bench.trial(trial_id).published_members == members[:2]
    said = [entry.reason.sentence for entry in bench.store.history(trial_id)]
    assert "lost 1 of 2 replicas; the others go on" in said
    bench.tick(12)
    assert members[3] not in {row.replica_id for row in bench.store.replicas(trial_id=trial_id)}


def test_what_is_left_of_a_replica_that_has_come_to_its_end_may_finish(tmp_path: Path) -> None:
    """One process of two returns from the code before the other, which reports and may export the model first."""
    bench = Bench(tmp_path, slots=2)
    trial_id = bench.submit(slots_per_replica=2, max_replicas=1)
    bench.train(trial_id)
    first, second = bench.trial(trial_id).members
    bench.launcher.end(second, 0)
    bench.tick(60)
    assert [row.replica_id for row in bench.store.replicas(trial_id=trial_id)] == [first]
    bench.store.set_outcome(trial_id, Outcome(kind="value", value=1.0))
    bench.tick()
    assert bench.trial(trial_id).state is TrialState.SUCCEEDED


def test_who_left_earlier_protects_no_other_replica() -> None:
    """Both were launched in one tick; one has left in good order, of the other one a process is lost long after."""
    spec = TrialSpec(study="s", number=0, entrypoint="m:f", max_replicas=2, slots_per_replica=2)
    trial = TrialRecord(trial_id="t", spec=spec, members=("r0", "r1"))
    rows = [
        ReplicaRecord(replica_id=f"r{index}", trial_id="t", node="n", slot=index, launch_index=index, launched_at=5.0)
        for index in range(4)
    ]
    gone = [replace(rows[1], exit_status=-9), *(replace(row, exit_status=0) for row in rows[2:])]
    torn = TornReplicas()
    assert not torn.look(trial, rows[:1], [rows[0], *gone], 100.0)
    assert torn.look(trial, rows[:1], [rows[0], *gone], 110.0) == {"r0"}


def test_processes_of_one_replica_are_told_one_epoch() -> None:
    joining = Joining()
    assert joining.alike("t", ("t-a", 1), 2) == 2
    assert joining.alike("t", ("t-a", 1), None) == 2
    assert joining.alike("t", ("t-b", 1), 40) == 40
    assert joining.alike("t", ("t-a", 2), 3) == 3


def test_what_was_launched_without_all_of_its_replica_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(tmp_path, slots=2)
    launch, left = InMemoryLauncher.launch, [1]

    def fails_at_the_second(self: InMemoryLauncher, request: Any) -> Any:
        if left and left[0] == 0:
            left.clear()
            raise LaunchFailed("no room in this test")
        if left:
            left[0] -= 1
        return launch(self, request)

    monkeypatch.setattr(InMemoryLauncher, "launch", fails_at_the_second)
    trial_id = bench.submit(slots_per_replica=2, max_replicas=1)
    bench.tick(40)
    rows = bench.store.replicas(trial_id=trial_id)
    assert [row.launch_index % 2 for row in rows] == [0, 1]
