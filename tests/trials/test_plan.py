"""The plan is tested against a small model of replicas that behave: whatever is wanted, the trial gets there."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trials.plan import (
    CONTACT_DEADLINE_SECONDS,
    LEFT_DEADLINE_SECONDS,
    PAUSE_DEADLINE_SECONDS,
    SWITCH_DEADLINE_SECONDS,
    Action,
    Circumstances,
    Launch,
    Publish,
    RetryJoin,
    Stop,
)
from trials.plan import plan as plan_by_node
from trials.record import Outcome, ReplicaRecord, ReplicaState, TrialRecord
from trials.spec import TrialSpec
from trials.states import TrialState


def trial(**changes: object) -> TrialRecord:
    record = TrialRecord(
        trial_id="t", spec=TrialSpec(study="s", number=0, entrypoint="m:f", max_replicas=8), state=TrialState.RUNNING
    )
    return replace(record, **changes)  # type: ignore[arg-type]


def replica(name: str, **changes: object) -> ReplicaRecord:
    record = ReplicaRecord(
        replica_id=name, trial_id="t", node="n", slot=0, launch_index=0, state=ReplicaState.ACTIVE, contact_at=0.0
    )
    return replace(record, **changes)  # type: ignore[arg-type]


def training(*names: str) -> TrialRecord:
    return trial(generation=1, published=1, members=names, published_members=names)


def plan(record: TrialRecord, wanted: int, replicas: list[ReplicaRecord], now: float, **more: Any) -> list[Action]:
    """On a cluster of one node."""
    return plan_by_node(record, {"n": wanted}, replicas, now, Circumstances(**more))


def of_two(*names: str, **changes: object) -> list[ReplicaRecord]:
    """Processes of replicas of two each; the launch index says whose."""
    return [replica(name, launch_index=index, **changes) for index, name in enumerate(names)]


def trial_of_two(*names: str, **changes: object) -> TrialRecord:
    spec = TrialSpec(study="s", number=0, entrypoint="m:f", max_replicas=4, slots_per_replica=2)
    return trial(spec=spec, generation=1, published=1, members=names, published_members=names, **changes)


def test_one_lost_process_is_a_lost_replica() -> None:
    a, b, c, d = of_two("a", "b", "c", "d")
    record = trial_of_two("a", "b", "c", "d")
    assert plan(record, 4, [a, b, c, d], 10.0) == []
    assert plan(record, 4, [a, b, c], 10.0) == [Publish(("a", "b"), None)]
    smaller = trial_of_two("a", "b")
    # The other one leaves by itself, or is ended when it has not; meanwhile nothing is started in its place.
    late = replace(c, state=ReplicaState.LAUNCHED)
    assert plan(smaller, 2, [a, b, late], 10.0) == []
    assert plan(smaller, 2, [a, b, late], 10.0, torn_for_good={"c"}) == [Stop("c", force=True)]
    assert plan(smaller, 4, [a, b], 10.0) == [Launch({"n": 2})]


def test_what_is_left_of_the_last_replica_is_not_replaced_beside_itself() -> None:
    _, b = of_two("a", "b")
    assert plan(trial_of_two("a", "b"), 2, [b], 10.0) == []
    assert plan(trial_of_two("a", "b"), 2, [b], 10.0, torn_for_good={"b"}) == [Stop("b", force=True)]


def test_while_a_trial_pauses_nobody_is_ended_for_who_left_first() -> None:
    _, b = of_two("a", "b")
    pausing = replace(trial_of_two("a", "b"), published=2, published_members=(), published_at=10.0)
    assert plan(pausing, 0, [b], 20.0) == []
    # But for who has been left by one that was lost.
    assert plan(pausing, 0, [b], 20.0, torn_for_good={"b"}) == [Stop("b", force=True)]
    # Nor is anything started beside them, or left to stay for ever.
    assert plan(pausing, 2, [b], 20.0) == []
    assert plan(pausing, 2, [b], 10.1 + PAUSE_DEADLINE_SECONDS) == [Stop("b", force=True)]


def test_replicas_join_and_leave_whole() -> None:
    a, b, c, d = of_two("a", "b", "c", "d")
    record = trial_of_two("a", "b")
    ready = [replace(each, state=ReplicaState.READY, join_epoch=2) for each in (c, d)]
    assert plan(record, 4, [a, b, ready[0], replace(ready[1], state=ReplicaState.LAUNCHED)], 10.0) == []
    assert plan(record, 4, [a, b, *ready], 10.0) == [Publish(("a", "b", "c", "d"), 2)]
    elsewhere = replace(ready[1], join_epoch=3)
    assert plan(record, 4, [a, b, ready[0], elsewhere], 10.0) == [RetryJoin(("c", "d"))]
    whole = trial_of_two("a", "b", "c", "d")
    assert plan(whole, 2, [a, b, c, d], 10.0) == [Publish(("a", "b"), None)]
    assert plan(whole, 4, [a, b, c, d], 10.0, leaving={"d"}) == [Publish(("a", "b"), None)]


def test_a_replica_may_lie_on_two_nodes() -> None:
    a, b = of_two("a", "b")
    there = [a, replace(b, node="m")]
    assert plan_by_node(trial_of_two("a", "b"), {"n": 1, "m": 1}, there, 10.0) == []
    assert plan_by_node(trial_of_two("a", "b"), {"n": 2}, there, 10.0) == [Launch({"n": 2})]


def test_a_new_trial_is_launched_and_let_in_when_all_are_ready() -> None:
    assert plan(trial(), 2, [], 0.0) == [Launch({"n": 2})]
    a, b = replica("a", state=ReplicaState.READY), replica("b", state=ReplicaState.LAUNCHED, launch_index=1)
    assert plan(trial(), 2, [a, b], 0.0) == []
    ready = [a, replace(b, state=ReplicaState.READY)]
    assert plan(trial(), 2, ready, 0.0) == [Publish(("a", "b"), None)]


def test_one_that_is_ready_early_waits_for_as_many_as_its_trial_must_have() -> None:
    ready = replica("a", state=ReplicaState.READY)
    assert plan(trial(), 3, [ready], 0.0) == [Publish(("a",), None)]
    of_two_at_least = trial(spec=replace(trial().spec, min_replicas=2))
    assert plan(of_two_at_least, 3, [ready], 0.0) == [Launch({"n": 2})]
    other = replica("b", state=ReplicaState.LAUNCHED, launch_index=1)
    assert plan(of_two_at_least, 3, [ready, other], 0.0) == []
    assert plan(of_two_at_least, 3, [ready, replace(other, state=ReplicaState.READY)], 0.0) == [
        Publish(("a", "b"), None)
    ]


def test_who_was_left_behind_ends_by_itself_and_is_ended_only_after_a_while() -> None:
    """Its part of the last step with it may still be on its way to the others."""
    a, left = replica("a"), replica("b")
    smaller = replace(training("a"), rescaled_at=100.0)
    assert plan(smaller, 1, [a, left], 100.1) == []
    assert plan(smaller, 2, [a, left], 100.1) == [Launch({"n": 1})]
    late = 100.0 + LEFT_DEADLINE_SECONDS + 1
    assert plan(smaller, 1, [a, left], late) == [Stop("b", force=True)]
    assert plan(smaller, 1, [a, replace(left, stop_requested_at=late - 0.1)], late) == []


def test_replicas_that_wait_for_one_another_although_none_is_gone_meet_anew() -> None:
    a, b = replica("a"), replica("b")
    assert plan(training("a", "b"), 2, [a, b], 10.0, broken_since=9.5) == []
    assert plan(training("a", "b"), 2, [a, b], 12.0, broken_since=9.5) == [Publish(("a", "b"), None)]
    assert plan(training("a", "b"), 2, [a], 9.6, broken_since=9.5) == [Publish(("a",), None)]
    assert plan(training("a", "b"), 2, [a, b], 12.0, broken_since=9.5, leaving={"b"}) == [Publish(("a",), None)]


def test_an_offer_in_which_replicas_failed_to_meet_is_made_anew() -> None:
    a, b = replica("a"), replica("b")
    offered = replace(training("a", "b", "c"), published=2, published_members=("a", "b"), published_at=10.0)
    assert plan(offered, 2, [a, b], 12.0) == []
    assert plan(offered, 2, [a, b], 12.0, broken_since=11.5) == []
    assert plan(offered, 2, [a, b], 10.9, broken_since=9.0) == [], "it may be of the loss that the offer answers"
    assert plan(offered, 2, [a, b], 13.0, broken_since=11.5) == [Publish(("a", "b"), None)]


def test_nothing_is_launched_beside_one_that_was_left_when_all_others_are_gone() -> None:
    """What became of those is judged first, once the trial has no process any more."""
    smaller = replace(training("a"), rescaled_at=100.0)
    assert plan(smaller, 2, [replica("left")], 100.5) == []
    late = 100.0 + LEFT_DEADLINE_SECONDS + 1
    assert plan(smaller, 2, [replica("left")], late) == [Stop("left", force=True)]


def test_those_that_somebody_else_ends_are_left_out_of_the_next_generation_at_once() -> None:
    members = [replica("a"), replica("b"), replica("c")]
    assert plan(training("a", "b", "c"), 3, members, 0.0, leaving={"b"}) == [Publish(("a", "c"), None)]
    assert plan(training("a"), 1, [replica("a")], 0.0, leaving={"a"}) == [Publish((), None)]
    joiner = replica("d", state=ReplicaState.LAUNCHED)
    assert plan(training("a", "b"), 3, [*members[:2], joiner], 0.0, leaving={"b"}) == [Publish(("a",), None)]
    assert plan(training("a", "b"), 2, members[:2], 0.0, leaving={"somebody"}) == []


def test_growing_waits_for_joiners_that_stand_in_one_epoch() -> None:
    a, b = replica("a"), replica("b", state=ReplicaState.LAUNCHED, launch_index=1)
    assert plan(training("a"), 2, [a], 0.0) == [Launch({"n": 1})]
    assert plan(training("a"), 2, [a, b], 0.0) == []
    b = replace(b, state=ReplicaState.READY, join_epoch=5)
    assert plan(training("a"), 2, [a, b], 0.0) == [Publish(("a", "b"), 5)]
    c = replica("c", state=ReplicaState.READY, launch_index=2, join_epoch=6)
    assert plan(training("a"), 3, [a, b, c], 0.0) == [RetryJoin(("b",))]


def test_joiners_of_a_distant_epoch_wait_for_it() -> None:
    a, b = replica("a"), replica("b", state=ReplicaState.READY, join_epoch=5)
    assert plan(training("a"), 2, [a, b], 0.0, near_epoch=4) == []
    assert plan(training("a"), 2, [a, b], 0.0, near_epoch=5) == [Publish(("a", "b"), 5)]


def test_a_pause_is_waited_for_and_whoever_leaves_first_is_not_lost() -> None:
    pausing = replace(training("a", "b"), published=2, published_members=(), published_at=0.0)
    assert plan(pausing, 0, [replica("b")], 1.0) == []
    assert plan(pausing, 2, [replica("b")], 1.0) == []
    assert plan(pausing, 0, [replica("b")], 1000.0) == [Stop("b", force=True)]


def test_shrinking_gives_up_joiners_before_members_and_keeps_rank_order() -> None:
    a, b, c = replica("a"), replica("b"), replica("c", state=ReplicaState.LAUNCHED)
    assert plan(training("a", "b"), 2, [a, b, c], 0.0) == [Stop("c", force=True)]
    assert plan(training("a", "b"), 1, [a, b, c], 0.0) == [Stop("c", force=True), Publish(("a",), None)]
    assert plan(training("a", "b"), 0, [a, b], 0.0) == [Publish((), None)]


def test_a_lost_replica_is_left_out_at_once_and_only_once() -> None:
    a = replica("a")
    assert plan(training("a", "b"), 2, [a], 0.0) == [Publish(("a",), None)]
    offered = replace(training("a", "b"), published=2, published_members=("a",))
    assert plan(offered, 2, [a], 0.0) == []
    # Those that the next generation leaves out go as soon as it begins, and before it is heard of.
    smaller = replace(training("a", "b", "c"), published=2, published_members=("a",))
    assert plan(smaller, 1, [a, replica("c")], 0.0) == []


def test_one_that_has_come_to_its_end_is_not_missed_unless_others_miss_it() -> None:
    record = training("a", "b", "c")
    left = [replica("a"), replica("c")]
    assert plan(record, 3, left, 1.0, done={"b"}) == []
    assert plan(record, 3, left, 1.0, done={"b"}, broken_since=0.9) == [Publish(("a", "c"), None)]
    assert plan(record, 3, left[:1], 1.0, done={"b"}) == [Publish(("a",), None)]
    assert plan(record, 3, left, 1.0) == [Publish(("a", "c"), None)]


def test_an_offer_that_nobody_enters_is_replaced() -> None:
    a, b = replica("a"), replica("b", state=ReplicaState.READY, join_epoch=3)
    offered = replace(training("a"), published=2, published_members=("a", "b"), join_epoch=3)
    assert plan(offered, 2, [a, b], 1.0) == []
    assert plan(offered, 2, [a], 1.0) == [Publish(("a",), None)]
    assert plan(offered, 2, [a, replace(b, join_epoch=4)], 1.0) == [Publish(("a",), None)]
    assert plan(offered, 2, [a, b], SWITCH_DEADLINE_SECONDS + 1) == [Publish(("a",), None)]


def test_a_process_that_never_calls_is_replaced() -> None:
    silent = replica("a", state=ReplicaState.LAUNCHED, contact_at=None)
    assert plan(trial(), 1, [silent], CONTACT_DEADLINE_SECONDS + 1) == [Stop("a", force=True)]
    slow = replica("a", state=ReplicaState.LAUNCHED, contact_at=1.0)
    assert plan(trial(), 1, [slow], 10 * CONTACT_DEADLINE_SECONDS) == []


def test_a_finished_trial_ends_its_replicas_and_insists() -> None:
    done = trial(state=TrialState.SUCCEEDED, outcome=Outcome(kind="value", value=1.0))
    assert plan(done, 0, [replica("a")], 0.0) == [Stop("a", force=True)]
    assert plan(done, 0, [replica("a", stop_requested_at=1.0)], 2.0) == []
    assert plan(done, 0, [replica("a", stop_requested_at=1.0)], 100.0) == [Stop("a", force=True)]


def test_a_trial_moves_by_growing_before_it_leaves() -> None:
    a = replica("a")
    assert plan_by_node(training("a"), {"m": 1}, [a], 0.0) == [Launch({"m": 1})]
    b = replica("b", node="m", state=ReplicaState.LAUNCHED, launch_index=1)
    assert plan_by_node(training("a"), {"m": 1}, [a, b], 0.0) == []
    b = replace(b, state=ReplicaState.READY, join_epoch=2)
    assert plan_by_node(training("a"), {"m": 1}, [a, b], 0.0) == [Publish(("a", "b"), 2)]
    assert plan_by_node(training("a", "b"), {"m": 1}, [a, b], 0.0) == [Publish(("b",), None)]


def test_a_trial_whose_new_slots_are_taken_leaves_first() -> None:
    a, b = replica("a"), replica("b", node="m")
    vacate = Circumstances(vacate=True)
    assert plan_by_node(training("a", "b"), {"m": 2}, [a, b], 0.0, vacate) == [Publish(("b",), None)]
    assert plan_by_node(training("a"), {"m": 1}, [a], 0.0, vacate) == [Publish((), None)]
    assert plan_by_node(training("a"), {"n": 2}, [a], 0.0, vacate) == [Launch({"n": 1})]


class World:
    """Replicas on two nodes that do what they are told, in a random order, and sometimes die."""

    def __init__(self, seed: int, deaths: bool, room: Mapping[str, int]) -> None:
        self.random = random.Random(seed)
        self.deaths = deaths
        self.now = 0.0
        self.count = 0
        self.room = room
        self.blocked = 0
        self.trial = trial(state=TrialState.PENDING)
        self.replicas: dict[str, ReplicaRecord] = {}

    def free(self, node: str) -> int:
        return self.room[node] - sum(row.node == node for row in self.replicas.values())

    def act(self, action: Action) -> None:
        if isinstance(action, Launch):
            nodes = [
                node for node, count in action.placement.items() for _ in range(max(0, min(count, self.free(node))))
            ]
            self.blocked = 0 if nodes else self.blocked + 1
            for node in nodes:
                name = f"r{self.count}"
                index = max((row.launch_index for row in self.replicas.values()), default=-1) + 1
                self.replicas[name] = replica(
                    name,
                    node=node,
                    state=ReplicaState.LAUNCHED,
                    launch_index=index,
                    launched_at=self.now,
                    contact_at=self.now,
                )
                self.count += 1
        elif isinstance(action, Stop):
            self.replicas.pop(action.replica_id, None)
        elif isinstance(action, Publish):
            assert set(action.members) <= set(self.replicas)
            self.trial = replace(
                self.trial,
                published=self.trial.published + 1,
                published_members=action.members,
                published_at=self.now,
                join_epoch=action.join_epoch,
            )
        else:
            for name in action.replica_ids:
                self.replicas[name] = replace(self.replicas[name], state=ReplicaState.LAUNCHED, join_epoch=None)

    def happen(self) -> None:
        """One thing happens on its own."""
        self.now += 0.1
        if self.deaths and self.replicas and self.random.random() < 0.05:
            self.replicas.pop(self.random.choice(sorted(self.replicas)))
        for name, row in sorted(self.replicas.items()):
            if row.state is ReplicaState.LAUNCHED and self.random.random() < 0.5:
                joins = bool(self.trial.members)
                self.replicas[name] = replace(row, state=ReplicaState.READY, join_epoch=7 if joins else None)
        offered = self.trial.published_members
        if self.trial.switching and set(offered) <= set(self.replicas) and self.random.random() < 0.5:
            self.trial = replace(self.trial, generation=self.trial.published, members=offered)
            for name in list(self.replicas):
                if name in offered:
                    self.replicas[name] = replace(self.replicas[name], state=ReplicaState.ACTIVE)
                elif self.replicas[name].state is ReplicaState.ACTIVE:
                    del self.replicas[name]
        if not self.replicas:
            self.trial = replace(self.trial, members=(), generation=self.trial.published, published_members=())


@settings(max_examples=200, deadline=None)
@given(
    st.integers(0, 10**6),
    st.lists(st.fixed_dictionaries({"n": st.integers(0, 3), "m": st.integers(0, 3)}), min_size=1, max_size=5),
    st.booleans(),
)
def test_whatever_is_wanted_the_trial_gets_there(seed: int, wishes: list[dict[str, int]], deaths: bool) -> None:
    world = World(seed, deaths, {"n": 3, "m": 3})
    for wanted in wishes:
        world.blocked = rounds_at_rest = 0
        for step in range(300):
            world.deaths = deaths and step < 100
            actions = plan_by_node(
                world.trial, wanted, list(world.replicas.values()), world.now, Circumstances(vacate=world.blocked > 3)
            )
            for action in actions:
                world.act(action)
            world.happen()
            assert all(world.free(node) >= 0 for node in world.room)
            at_rest = not actions and all(row.state is ReplicaState.ACTIVE for row in world.replicas.values())
            rounds_at_rest = rounds_at_rest + 1 if at_rest and not world.deaths else 0
            if rounds_at_rest == 20:
                break
        active = [row for row in world.replicas.values() if row.state is ReplicaState.ACTIVE]
        assert len(active) == len(world.replicas)
        assert {node: sum(row.node == node for row in active) for node in wanted} == wanted
        assert set(world.trial.members) == set(world.replicas)


@pytest.mark.parametrize("wanted", [0, 1, 2, 3])
def test_planning_twice_without_a_change_in_between_launches_nothing_twice(wanted: int) -> None:
    world = World(1, deaths=False, room={"n": 3})
    for action in plan(world.trial, wanted, [], 0.0):
        world.act(action)
    again = plan(world.trial, wanted, list(world.replicas.values()), 0.0)
    assert not [action for action in again if isinstance(action, Launch)]
