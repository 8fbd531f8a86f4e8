from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dist_core.goodput import BatchBounds, ThroughputParams
from scheduler.policy import GoodputPolicy, policy_by_name
from scheduler.profile import StudyProfile, TrialModel
from scheduler.snapshot import NodeView, Snapshot, TrialView

POLICY = GoodputPolicy()


def model(*, overhead: float = 0.01, var: float = 50.0, seen: int = 8) -> TrialModel:
    return TrialModel(
        profile=StudyProfile(
            params=ThroughputParams(0.02, 0.001, overhead * 1.1, 0.001, overhead, 0.001, 1.5), most_replicas=seen
        ),
        noise=var,
        bounds=BatchBounds(init_batch=64, max_batch=2048, min_atomic=8, max_atomic=256),
    )


ONE_SLOT = float(model().goodput(1, 1)[0])
"""Goodput of a replica."""


def running(name: str, slots_held: int = 1, **changes: Any) -> TrialView:
    view = TrialView(
        trial_id=name,
        study="s",
        min_replicas=1,
        max_replicas=8,
        placement={"n0": slots_held},
        can_rescale=True,
        model=model(),
        remaining_progress=300.0 * ONE_SLOT,
    )
    return replace(view, **changes)


def waiting(name: str, **changes: Any) -> TrialView:
    return replace(TrialView(trial_id=name, study="s", min_replicas=1, max_replicas=8), **changes)


def snapshot(*trials: TrialView, slots: int = 4, nodes: int = 1, free_for: float = 100.0) -> Snapshot:
    return Snapshot(
        now=0.0,
        nodes=tuple(NodeView(name=f"n{index}", slots=slots) for index in range(nodes)),
        trials=trials,
        free_for_seconds=free_for,
    )


def counts(view: Snapshot) -> dict[str, int]:
    return {trial: grant.slots for trial, grant in POLICY.allocate(view).items()}


def test_free_slots_go_to_the_promising() -> None:
    found = counts(snapshot(running("good", promise=0.9), running("bad", promise=0.1)))
    assert found["good"] == 3
    assert found["bad"] == 1


def test_a_waiting_trial_takes_a_slot_back_from_the_one_that_loses_least() -> None:
    grants = POLICY.allocate(snapshot(running("good", 2, promise=0.9), running("bad", 2, promise=0.2), waiting("new")))
    assert {name: grant.slots for name, grant in grants.items()} == {"good": 2, "bad": 1, "new": 1}
    assert grants["bad"].reason.code == "gives_way"
    assert "makes room for a waiting trial" in grants["bad"].reason.sentence


def test_nobody_grows_while_a_trial_waits() -> None:
    found = counts(snapshot(running("a"), running("b"), running("c"), waiting("large", min_replicas=2)))
    assert found == {"a": 1, "b": 1, "c": 1, "large": 0}


def test_a_waiting_trial_is_told_what_it_lacks() -> None:
    grants = POLICY.allocate(snapshot(running("a", 4, min_replicas=4), waiting("b", min_replicas=2)))
    assert grants["b"].reason.sentence == "needs 2 slots; 0 of 4 can be freed now"
    grants = POLICY.allocate(snapshot(waiting("b", min_replicas=9, max_replicas=9)))
    assert grants["b"].reason.code == "too_large"


def test_growing_must_pay_for_its_pause() -> None:
    assert counts(snapshot(running("a", pause_seconds=0.1)))["a"] > 1
    assert counts(snapshot(running("a", pause_seconds=10_000.0)))["a"] == 1
    assert counts(snapshot(running("a", remaining_progress=ONE_SLOT)))["a"] == 1


def test_a_trial_that_does_not_scale_stays_small() -> None:
    assert counts(snapshot(running("a", model=model(overhead=5.0))))["a"] == 1


def test_exploration_goes_so_far_beyond_what_was_measured() -> None:
    assert counts(snapshot(running("a", model=model(seen=1)), slots=8))["a"] == 4


def test_a_moment_after_a_trial_ended_its_slots_are_left_for_the_next() -> None:
    assert counts(snapshot(running("a"), free_for=0.1)) == {"a": 1}


def test_a_slot_moves_only_for_a_clear_gain() -> None:
    clear = counts(snapshot(running("a", 3, promise=0.1), running("b", 1, promise=0.9)))
    assert clear == {"a": 1, "b": 3}
    even = counts(snapshot(running("a", 2, promise=0.5), running("b", 2, promise=0.5)))
    assert even == {"a": 2, "b": 2}


def test_a_trial_that_just_rescaled_is_left_alone() -> None:
    found = counts(snapshot(running("a", 3, promise=0.1, since_rescale_seconds=0.5), running("b", 1, promise=0.9)))
    assert found == {"a": 3, "b": 1}


def test_a_held_trial_gets_nothing_and_says_why() -> None:
    grants = POLICY.allocate(snapshot(running("a", 2, held="its driver is gone")))
    assert grants["a"].slots == 0
    assert grants["a"].reason.sentence == "its driver is gone"


def test_unknown_policies_are_named() -> None:
    with pytest.raises(ValueError, match="policy 'x' is not known; choose one of goodput"):
        policy_by_name("x")


views = st.builds(
    lambda number, minimum, extra, held, ready, promise, seen, var, since, weight, stopped: TrialView(
        trial_id=f"t{number}",
        study="s",
        min_replicas=minimum,
        max_replicas=minimum + extra,
        placement={"n0": held} if held else {},
        can_rescale=ready and held > 0,
        model=model(var=var, seen=seen) if ready else None,
        promise=promise,
        since_rescale_seconds=since,
        study_weight=weight,
        held="stopped" if stopped else None,
    ),
    st.integers(0, 10**6),
    st.integers(1, 4),
    st.integers(0, 6),
    st.integers(0, 3),
    st.booleans(),
    st.floats(0.01, 0.99),
    st.integers(1, 8),
    st.floats(0.0, 1e4),
    st.floats(0.0, 100.0),
    st.floats(0.1, 10.0),
    st.integers(0, 9).map(lambda value: value == 0),
)


@settings(max_examples=150, deadline=None)
@given(
    st.lists(views, max_size=8, unique_by=lambda view: view.trial_id),
    st.integers(1, 4),
    st.integers(1, 8),
    st.randoms(),
)
def test_invariants(trials: list[TrialView], nodes: int, slots: int, order: Any) -> None:
    capacity = nodes * slots
    kept, used = [], 0
    for view in trials:
        if used + view.held_slots <= slots:
            used += view.held_slots
            kept.append(view)
    grants = POLICY.allocate(snapshot(*kept, slots=slots, nodes=nodes))
    assert set(grants) == {view.trial_id for view in kept}
    assert sum(grant.slots for grant in grants.values()) <= capacity
    for node in range(nodes):
        assert sum(grant.placement.get(f"n{node}", 0) for grant in grants.values()) <= slots
    for view in kept:
        count = grants[view.trial_id].slots
        assert count == 0 or view.min_replicas <= count <= max(view.max_replicas, view.held_slots)
        assert count == 0 or view.held is None
        assert grants[view.trial_id].reason.sentence
    shuffled = list(kept)
    order.shuffle(shuffled)
    again = POLICY.allocate(snapshot(*shuffled, slots=slots, nodes=nodes))
    running_ids = {view.trial_id for view in kept if view.held_slots and not view.held}
    if sum(view.min_replicas for view in kept) <= capacity:
        assert {name: again[name].slots for name in running_ids} == {name: grants[name].slots for name in running_ids}


@settings(max_examples=50, deadline=None)
@given(st.lists(views, max_size=6, unique_by=lambda view: view.trial_id))
def test_the_answer_is_at_rest(trials: list[TrialView]) -> None:
    """Granted what it asked for, and just rescaled, the policy asks for nothing else."""
    first = POLICY.allocate(snapshot(*(replace(view, placement={}) for view in trials), slots=8))
    settled = [replace(view, placement=first[view.trial_id].placement, since_rescale_seconds=0.0) for view in trials]
    second = POLICY.allocate(snapshot(*settled, slots=8))
    assert {name: grant.slots for name, grant in second.items()} == {name: grant.slots for name, grant in first.items()}
