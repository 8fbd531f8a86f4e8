"""Kinds of nodes, reservations, pinned and non-preemptible trials, quotas and priorities, for every policy."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dist_core.goodput import ThroughputParams
from scheduler.allocation.admission import AGING_SECONDS, not_admitted
from scheduler.allocation.groups import may_use, node_groups
from scheduler.knowledge.accounts import effective_priorities, unknown_names
from scheduler.knowledge.profile import StudyProfile
from scheduler.simulator.rivals import COMPARED, compared_policy
from scheduler.snapshot import Grant, NodeView, Snapshot, TrialView, check_grants
from tests.support.views import AT_ONCE, SEARCHES, model, running, views, waiting
from trials.errors import InvalidStudyTerms
from trials.record import SlotQuota, Study
from trials.terms import StudyTerms

ELASTIC = sorted(set(COMPARED) - {"fifo", "asha_static", "tiresias"})


def nodes(**kinds: int) -> tuple[NodeView, ...]:
    """So many nodes of 4 slots of each kind, named after it."""
    return tuple(
        NodeView(name=f"{kind}{index}", slots=4, kind=kind) for kind, count in kinds.items() for index in range(count)
    )


def seen(*trials: TrialView, on: tuple[NodeView, ...]) -> Snapshot:
    return Snapshot(now=1e4, nodes=on, trials=trials)


def quota_of(study: str, slots: int) -> SlotQuota:
    return SlotQuota(f"study {study}", slots, "its study's quota of 2 slots leaves too few for it")


SHARED = SlotQuota("namespace n", 5, "the quota of namespace n is used")
"""By trials of several studies."""


def decided(name: str, snapshot: Snapshot) -> dict[str, Grant]:
    grants = compared_policy(name).allocate(snapshot)
    assert set(grants) == {view.trial_id for view in snapshot.trials}
    check_grants(snapshot, grants)
    return grants


constrained = st.builds(
    lambda view, study, only_on, preemptible, quota, shared, priority, node: replace(
        view,
        study=study,
        only_on=only_on,
        preemptible=preemptible,
        quotas=({"s": (), "t": (quota_of("t", quota),)}[study]) + ((SHARED,) if shared else ()),
        study_priority={"s": priority, "t": 0}[study],
        placement={node: view.held_slots} if view.held_slots else {},
    ),
    views,
    st.sampled_from(["s", "t"]),
    st.sampled_from([(), ("fast",), ("slow0", "slow1"), ("nowhere",)]),
    st.booleans(),
    st.just(3),
    st.booleans(),
    st.just(1),
    st.sampled_from(["fast0", "slow0", "slow1"]),
)


def that_fit(trials: list[TrialView]) -> list[TrialView]:
    kept, used = [], Counter[str]()
    for view in trials:
        if view.held_slots > view.max_slots or any(used[node] + n > 4 for node, n in view.placement.items()):
            continue
        used.update(view.placement)
        kept.append(view)
    return kept


@pytest.mark.parametrize("name", [*AT_ONCE, pytest.param(SEARCHES, marks=pytest.mark.slow)])
@settings(max_examples=40, deadline=None)
@given(trials=st.lists(constrained, max_size=7, unique_by=lambda view: view.trial_id), order=st.randoms())
def test_invariants(name: str, trials: list[TrialView], order: Any) -> None:
    kept = that_fit(trials)
    on = (*nodes(fast=1, slow=2), NodeView(name="mine", slots=2, kind="slow", reserved_for=("t",)))
    snapshot = seen(*kept, on=on)
    grants = decided(name, snapshot)
    kind_of = {node.name: node.kind for node in on}
    for view in kept:
        placement = {node: count for node, count in grants[view.trial_id].placement.items() if count}
        if not view.preemptible and view.held is None and view.min_slots <= view.held_slots <= view.max_slots:
            assert placement == dict(view.placement)
            continue
        assert len({kind_of[node] for node in placement}) <= 1
        if view.only_on:
            assert all(node in view.only_on or kind_of[node] in view.only_on for node in placement)
        assert "mine" not in placement or view.study == "t"
    for quota in {quota for view in kept for quota in view.quotas}:
        sharing = [view for view in kept if quota in view.quotas]
        # Those that cannot be resized now, or never may, keep what they have.
        fixed = sum(view.held_slots for view in sharing if not view.preemptible or not view.can_rescale)
        assert sum(grants[view.trial_id].slots for view in sharing) <= max(quota.slots, fixed)
    shuffled = list(kept)
    order.shuffle(shuffled)
    again = decided(name, replace(snapshot, trials=tuple(shuffled)))
    assert {key: grant.slots for key, grant in again.items()} == {key: grant.slots for key, grant in grants.items()}


@pytest.mark.parametrize("name", ELASTIC)
def test_a_studys_quota_holds_and_the_others_get_the_rest(name: str) -> None:
    mine = [
        running(f"a{index}", 1, study="a", quotas=(quota_of("a", 3),), placement={f"x{index}": 1}) for index in range(2)
    ]
    grants = decided(name, seen(*mine, running("b", 1, study="b", placement={"x0": 1}), on=nodes(x=2)))
    used = sum(grants[view.trial_id].slots for view in mine)
    assert used <= 3
    assert grants["b"].slots >= (1 if name == "sia" else 2)


@pytest.mark.parametrize("name", ELASTIC)
def test_a_quota_that_studies_share_holds_for_all_of_them_together(name: str) -> None:
    shared = [
        running(f"{study}0", 1, study=study, quotas=(SHARED, quota_of(study, 4)), placement={f"x{index}": 1})
        for index, study in enumerate("ab")
    ]
    more = waiting("c0", study="c", quotas=(SHARED,), min_slots=4, max_slots=4)
    grants = decided(name, seen(*shared, more, on=nodes(x=3)))
    assert 2 <= sum(grants[view.trial_id].slots for view in (*shared, more)) <= 5
    assert not grants["c0"].slots
    assert grants["c0"].reason.sentence == SHARED.sentence


def test_trials_beyond_the_quota_wait_and_are_told_so() -> None:
    trials = [waiting(f"t{index}", quotas=(quota_of("s", 2),), submitted_at=float(index)) for index in range(4)]
    grants = decided("goodput", seen(*trials, on=nodes(x=2)))
    assert [bool(grants[view.trial_id].slots) for view in trials] == [True, True, False, False]
    assert grants["t3"].reason.sentence == "its study's quota of 2 slots leaves too few for it"


@pytest.mark.parametrize("name", COMPARED)
def test_a_higher_priority_comes_first_and_preempts(name: str) -> None:
    low = [running(f"l{index}", 1, study="low", placement={"x0": 1}, submitted_at=9e3) for index in range(4)]
    high = [waiting(f"h{index}", study="high", study_priority=5, submitted_at=9.9e3) for index in range(3)]
    grants = decided(name, seen(*low, *high, on=nodes(x=1)))
    assert all(grants[view.trial_id].slots == 1 for view in high)
    assert sum(grants[view.trial_id].slots for view in low) == 1


def test_who_waits_long_enough_comes_first_in_the_end() -> None:
    old = waiting("old", study="low", submitted_at=-1.5 * AGING_SECONDS)
    new = [waiting(f"n{index}", study="high", study_priority=2, submitted_at=0.0) for index in range(4)]
    groups = node_groups(nodes(x=1), [])
    assert "old" in not_admitted([old, *new], groups, 0.0, by_share=False)
    assert "old" not in not_admitted([old, *new], groups, 0.9 * AGING_SECONDS, by_share=False)


@pytest.mark.parametrize("name", ["goodput", "fifo", "fair_share"])
def test_who_came_first_by_waiting_stays_until_its_end(name: str) -> None:
    """Hours of decisions, a minute each: one trial of the low study starts once, and its place goes to the next."""
    high = {f"h{index}" for index in range(4)}
    held = dict.fromkeys(["l0", "l1", *sorted(high)], 0)
    attained = dict.fromkeys(held, 0.0)
    changes: list[tuple[float, str]] = []
    for minute in range(6 * 60):
        if minute == 240:
            del held["l0"]
        now = 60.0 * minute
        trials = [
            waiting(
                trial,
                study="high" if trial in high else "low",
                study_priority=1 if trial in high else 0,
                max_slots=1,
                placement={"x0": count} if count else {},
                served_seconds=attained[trial],
            )
            for trial, count in held.items()
        ]
        grants = compared_policy(name).allocate(replace(seen(*trials, on=nodes(x=1)), now=now))
        for trial in held:
            if grants[trial].slots != held[trial]:
                changes.append((now, trial))
            held[trial] = grants[trial].slots
            attained[trial] += 60.0 * held[trial]
    starts = [trial for _, trial in changes if trial not in high]
    assert starts == ["l0", "l1"], changes
    assert changes[4][0] <= 2.1 * AGING_SECONDS


@pytest.mark.parametrize("name", COMPARED)
def test_a_kept_trial_whose_node_became_smaller_spoils_nothing(name: str) -> None:
    kept = running("kept", 4, max_slots=4, preemptible=False, placement={"x0": 4})
    small = (NodeView(name="x0", slots=2, kind="x"),)
    decided(name, seen(kept, waiting("w"), on=small))


@pytest.mark.parametrize("name", COMPARED)
def test_trials_wait_while_all_slots_are_kept(name: str) -> None:
    kept = running("kept", 4, max_slots=4, preemptible=False, placement={"x0": 4})
    grants = decided(name, seen(kept, waiting("w", only_on=("x0",)), waiting("v"), on=nodes(x=1)))
    assert (grants["kept"].slots, grants["w"].slots, grants["v"].slots) == (4, 0, 0)
    assert grants["w"].reason.sentence == "all slots are held by trials that cannot be preempted"


@pytest.mark.parametrize("name", COMPARED)
def test_a_node_that_others_use_wholly_is_no_node(name: str) -> None:
    busy = (NodeView(name="x0", slots=0, kind="x"), NodeView(name="x1", slots=1, kind="x"))
    assert decided(name, seen(waiting("w"), on=busy))["w"].placement == {"x1": 1}
    assert decided(name, seen(waiting("w"), on=busy[:1]))["w"].reason.sentence == "other trials use all nodes"


def test_who_may_go_anywhere_leaves_room_for_those_who_may_not() -> None:
    nodes_there = (NodeView(name="g", slots=4), NodeView(name="c", slots=3))
    anywhere = waiting("a", max_slots=1)
    pinned = waiting("p", min_slots=4, only_on=("g",), submitted_at=1.0)
    low = waiting("z", study="low", study_priority=-1, max_slots=1)
    refused = not_admitted([anywhere, pinned, low], node_groups(nodes_there, [pinned]), 0.0, by_share=True)
    assert refused == {}


@pytest.mark.parametrize("name", COMPARED)
def test_what_is_kept_counts_against_the_quota(name: str) -> None:
    kept = running("kept", 3, max_slots=4, preemptible=False, placement={"x0": 3}, quotas=(quota_of("s", 4),))
    others = [waiting(f"w{index}", quotas=(quota_of("s", 4),), max_slots=1) for index in range(3)]
    grants = decided(name, seen(kept, *others, on=nodes(x=2)))
    assert sum(grant.slots for grant in grants.values()) == 4


@pytest.mark.parametrize("name", COMPARED)
def test_what_cannot_be_resized_now_counts_against_the_quota(name: str) -> None:
    """A quota was lowered to 3 while the study holds 4 slots, 3 of them by a trial in the middle of a rescale."""
    quotas = (quota_of("s", 3),)
    busy = running("busy", 3, max_slots=3, can_rescale=False, placement={"x0": 3}, quotas=quotas, promise=0.2)
    other = running("other", 1, max_slots=1, placement={"x0": 1}, quotas=quotas)
    grants = decided(name, seen(busy, other, on=nodes(x=1)))
    assert sum(grant.slots for grant in grants.values()) <= 3


@pytest.mark.parametrize("name", COMPARED)
def test_slots_that_a_higher_priority_cannot_use_go_to_others(name: str) -> None:
    high = [waiting(f"h{index}", study="high", study_priority=5, only_on=("x0",), max_slots=1) for index in range(8)]
    low = [waiting(f"l{index}", study="low", max_slots=1) for index in range(4)]
    grants = decided(name, seen(*high, *low, on=nodes(x=2)))
    assert sum(grants[view.trial_id].slots for view in high) == 4
    assert sum(grants[view.trial_id].slots for view in low) == 4


def test_studies_share_by_weight_however_many_trials_they_submit() -> None:
    many = [running(f"m{index}", 1, study="many", placement={"x0": 1}) for index in range(4)]
    many += [waiting(f"w{index}", study="many") for index in range(50)]
    few = [waiting(f"f{index}", study="few", study_weight=3.0, submitted_at=9.9e3) for index in range(5)]
    grants = decided("goodput", seen(*many, *few, on=nodes(x=1)))
    assert sum(grants[view.trial_id].slots for view in few) == 3
    assert sum(grants[view.trial_id].slots for view in many) == 1


@pytest.mark.parametrize("name", ["goodput", "sia"])
def test_a_trial_goes_to_the_kind_of_nodes_that_suits_it(name: str) -> None:
    """The one that gains most from the fast nodes has them, although the other one could use them as well."""
    fast = StudyProfile(ThroughputParams(0.002, 0.0001, 0.011, 0.001, 0.01, 0.001, 1.5), most_replicas=8)
    suited = replace(model(), kind="slow", elsewhere={"fast": (fast, 1.0)})
    indifferent = replace(model(), kind="slow", elsewhere={"fast": (model().profile, 1.0)})
    a = waiting("a", model=suited, remaining_progress=1e5, min_slots=4)
    b = waiting("b", model=indifferent, remaining_progress=1e5, min_slots=4)
    grants = decided(name, seen(a, b, on=nodes(slow=1, fast=1)))
    assert set(grants["a"].placement) == {"fast0"}
    assert set(grants["b"].placement) == {"slow0"}


def test_a_kind_nobody_has_measured_is_taken_to_be_like_the_known_one() -> None:
    known = model(seen=8)
    other = known.on("new")
    assert other.most_profiled == 1
    assert other.curve(4, _one())[0] == pytest.approx(known.curve(4, _one())[0])
    assert other.on("").profile is known.profile


def _one() -> Any:
    import numpy as np

    return np.array([1])


def test_priorities_of_studies_that_yield() -> None:
    known = [
        study("a", priority=3, yields_to=("b", "gone")),
        study("b", priority=1),
        study("c", yields_to=("a",)),
    ]
    assert effective_priorities(known) == {"a": 0, "b": 1, "c": -1}
    assert unknown_names(known[0], known) == ["gone"]
    with pytest.raises(InvalidStudyTerms, match=r"in a circle: (a -> b -> a|b -> a -> b)"):
        effective_priorities([study("a", yields_to=("b",)), study("b", yields_to=("a",))])


def study(name: str, title: str = "", **terms: Any) -> Study:
    return Study(name=name, title=title, terms=StudyTerms(**terms))


def test_studies_are_named_by_what_their_people_call_them() -> None:
    """All of one title are meant, and a name that is somebody's title is not meant as a name."""
    known = [
        study("resnet-1", "resnet", priority=2),
        study("resnet-2", "resnet", priority=1),
        study("mine", priority=5, yields_to=("resnet",)),
        study("by-name", priority=5, yields_to=("resnet-1",)),
        study("resnet", "another"),
    ]
    found = effective_priorities(known)
    assert (found["mine"], found["by-name"]) == (0, 1)
    assert not any(unknown_names(each, known) for each in known)


def test_a_node_is_reserved_for_what_its_study_is_called() -> None:
    [group] = node_groups((NodeView(name="n", slots=1, reserved_for=("resnet",)),), ())
    mine, squatter = (
        replace(waiting("t"), study=name, study_title=title) for name, title in (("x-1", "resnet"), ("resnet", "x"))
    )
    assert may_use(mine, group) and may_use(replace(waiting("t"), study="resnet"), group)
    assert not may_use(squatter, group)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"weight": 0.0}, "weight is 0.0; it must be from 1e-06"),
        ({"priority": 2000}, "from -1000 to 1000"),
        ({"quota": 0}, "quota is 0; it must be a whole number of at least 1"),
        ({"goal": "glory"}, "goal is 'glory'; choose one of completion_time"),
        ({"goal": "deadline"}, "needs a deadline"),
        ({"budget_slot_hours": -1.0}, "must be a number above 0"),
    ],
)
def test_terms_that_mean_nothing_are_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidStudyTerms, match=words):
        StudyTerms(**changes)
