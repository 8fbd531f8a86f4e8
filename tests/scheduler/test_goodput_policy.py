"""What the default policy decides in situations that a person can judge."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dist_core.goodput import BatchBounds, ThroughputParams
from dist_core.goodput.speed_profiles import speed_profile
from scheduler.knowledge.profile import StudyProfile
from scheduler.policy import GoodputPolicy, policy_by_name
from scheduler.snapshot import NodeView, Snapshot, TrialView
from tests.support.views import ONE_SLOT, model, running, snapshot, that_fit, views, waiting
from trials.terms import GOALS, Goal

POLICY = GoodputPolicy()


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


def test_slots_on_another_node_are_worth_what_they_are_worth_there() -> None:
    """Four would be best on one node; only three are to be had there, and the network costs what a fourth brings."""
    speeds = replace(
        model(), profile=StudyProfile(params=speed_profile("resnet50-imagenet").params, most_replicas=8), noise=7.5
    )
    one = float(speeds.curve(4, np.array([1]))[0])

    def trial(name: str, node: str, count: int, **changes: Any) -> TrialView:
        remaining = 300.0 * one
        view = running(name, count, model=speeds, start_seconds=0.3, pause_seconds=0.05, remaining_progress=remaining)
        return replace(view, placement={node: count}, **changes)

    fixed = [trial("b", "n0", 1, max_slots=1), trial("c", "n1", 2, max_slots=2)]
    grant = POLICY.allocate(snapshot(trial("a", "n0", 2), *fixed, nodes=2))["a"]
    assert grant.placement == {"n0": 3}
    alone = POLICY.allocate(snapshot(trial("a", "n0", 2, max_slots=4), nodes=2))["a"]
    assert alone.placement == {"n0": 4}


def test_nobody_grows_while_a_trial_waits() -> None:
    found = counts(snapshot(running("a"), running("b"), running("c"), waiting("large", min_slots=2)))
    assert found == {"a": 1, "b": 1, "c": 1, "large": 0}


def test_a_waiting_trial_is_told_what_it_lacks() -> None:
    grants = POLICY.allocate(snapshot(running("a", 4, min_slots=4), waiting("b", min_slots=2)))
    assert grants["b"].reason.sentence == "needs 2 slots; 0 of 4 can be freed now"
    grants = POLICY.allocate(snapshot(waiting("b", min_slots=9, max_slots=9)))
    assert grants["b"].reason.code == "too_large"


def test_growing_must_pay_for_its_pause() -> None:
    assert counts(snapshot(running("a", pause_seconds=0.1)))["a"] > 1
    assert counts(snapshot(running("a", pause_seconds=10_000.0)))["a"] == 1
    assert counts(snapshot(running("a", remaining_progress=ONE_SLOT)))["a"] == 1


def test_a_trial_that_does_not_scale_stays_small() -> None:
    assert counts(snapshot(running("a", model=model(overhead=5.0))))["a"] == 1


def test_nobody_gets_replicas_beyond_the_smallest_local_batch() -> None:
    bounds = BatchBounds(init_batch=64, max_batch=128, min_atomic=64)
    found = counts(snapshot(running("a", model=replace(model(), bounds=bounds)), slots=8))
    assert found["a"] <= 2


def test_exploration_goes_so_far_beyond_what_was_measured() -> None:
    assert counts(snapshot(running("a", model=model(seen=1)), slots=8))["a"] == 4


def test_slots_are_left_for_trials_that_are_about_to_come() -> None:
    assert counts(snapshot(running("a"), coming=(waiting("next"),))) == {"a": 3}
    three = tuple(waiting(f"next-{index}") for index in range(3))
    assert counts(snapshot(running("a"), coming=three)) == {"a": 1}
    # As if they were in the queue already: nobody grows while somebody waits for more than is free.
    assert counts(snapshot(running("a"), coming=(*three, waiting("one more")))) == {"a": 1}


def test_a_trial_is_left_alone_until_it_has_measured_its_new_size() -> None:
    unsettled = running("a", 2, steps_measured=3, since_rescale_seconds=5.0)
    assert counts(snapshot(unsettled)) == {"a": 2}
    assert counts(snapshot(replace(unsettled, steps_measured=8))) == {"a": 4}
    assert counts(snapshot(replace(unsettled, since_rescale_seconds=31.0))) == {"a": 4}
    # Its first size is no change that would have to pay: any step tells how fast it is.
    first = replace(unsettled, num_rescales=0, since_rescale_seconds=0.2)
    assert counts(snapshot(first)) == {"a": 4}
    assert counts(snapshot(replace(first, steps_measured=0))) == {"a": 2}
    # A trial that waits for its minimum comes first all the same; one of a study in a hurry does not.
    full = running("b", 2)
    assert counts(snapshot(unsettled, full, waiting("c")))["c"] == 1
    hurried = [replace(each, goal="time_to_best") for each in (unsettled, full, waiting("c", model=model()))]
    assert counts(snapshot(*hurried))["a"] == 2


def test_a_slot_moves_only_for_a_clear_gain() -> None:
    clear = counts(snapshot(running("a", 3, promise=0.1), running("b", 1, promise=0.9)))
    assert clear == {"a": 1, "b": 3}
    even = counts(snapshot(running("a", 2, promise=0.5), running("b", 2, promise=0.5)))
    assert even == {"a": 2, "b": 2}


def test_a_trial_that_just_rescaled_is_left_alone() -> None:
    found = counts(snapshot(running("a", 3, promise=0.1, since_rescale_seconds=0.5), running("b", 1, promise=0.9)))
    assert found == {"a": 3, "b": 1}


@pytest.mark.parametrize("between_nodes", [0.01, 20.0])
def test_a_slot_on_another_node_goes_to_the_trial_that_gains_by_it(between_nodes: float) -> None:
    over_a_network = model()
    params = replace(over_a_network.profile.params, alpha_n=between_nodes)
    slow = replace(over_a_network, profile=replace(over_a_network.profile, params=params))
    best = running("best", promise=0.9, model=slow)
    beside = running("beside", model=None, max_slots=1)
    other = running("other", promise=0.1, placement={"n1": 1})
    found = POLICY.allocate(snapshot(best, beside, other, slots=2, nodes=2))
    grown = "best" if between_nodes < 0.1 else "other"
    assert {name: grant.slots for name, grant in found.items()} == {"best": 1, "beside": 1, "other": 1} | {grown: 2}


def test_a_held_trial_gets_nothing_and_says_why() -> None:
    grants = POLICY.allocate(snapshot(running("a", 2, held="its driver is gone")))
    assert grants["a"].slots == 0
    assert grants["a"].reason.sentence == "its driver is gone"


class Absurd:
    """Promises a thousandfold speed, or nothing that is a number."""

    most_profiled = most_useful = 8
    bounds = model().bounds

    def __init__(self, *speeds: float) -> None:
        self._speeds = speeds

    def curve(self, node_slots: int, counts: np.ndarray) -> np.ndarray:
        speeds: np.ndarray = np.interp(counts, [1, 8], self._speeds)
        return speeds

    def goodput(self, nodes: Any, replicas: Any) -> np.ndarray:
        return self.curve(1, np.asarray(replicas))


def test_a_model_that_promises_the_impossible_is_not_believed() -> None:
    absurd = running("a", 2, model=Absurd(1.0, 1e6), promise=0.3)
    assert counts(snapshot(absurd, running("b", 2, promise=0.9)))["b"] >= 2
    for speeds in ((float("nan"), float("nan")), (0.0, 0.0), (float("inf"), 1.0)):
        assert counts(snapshot(running("a", 1, model=Absurd(*speeds)))) == {"a": 1}


def test_a_node_that_appears_twice_is_refused() -> None:
    node = NodeView(name="n0", slots=4)
    with pytest.raises(ValueError, match="node 'n0' appears twice"):
        Snapshot(now=0.0, nodes=(node, node), trials=())


def test_unknown_policies_are_named() -> None:
    with pytest.raises(ValueError, match="policy 'x' is not known; choose one of fair_share, fifo, goodput, top_job"):
        policy_by_name("x")


@settings(max_examples=50, deadline=None)
@given(st.lists(views, max_size=6, unique_by=lambda view: view.trial_id))
def test_the_answer_is_at_rest(trials: list[TrialView]) -> None:
    """Granted what it asked for, and just rescaled, the policy asks for nothing else."""
    first = POLICY.allocate(snapshot(*(replace(view, placement={}) for view in trials), slots=8))
    settled = [replace(view, placement=first[view.trial_id].placement, since_rescale_seconds=0.0) for view in trials]
    second = POLICY.allocate(snapshot(*settled, slots=8))
    assert {name: grant.slots for name, grant in second.items()} == {name: grant.slots for name, grant in first.items()}


params = st.builds(
    ThroughputParams,
    st.floats(1e-4, 0.1),
    st.floats(1e-5, 0.01),
    st.floats(1e-5, 0.5),
    st.floats(0.0, 0.05),
    st.floats(1e-5, 0.5),
    st.floats(0.0, 0.05),
    st.floats(1.0, 10.0),
)
noisy_views = st.builds(
    lambda view, params, held, pause, start, left, noise: replace(
        view,
        placement={"n0": held} if held else {},
        can_rescale=held > 0,
        model=replace(model(var=noise), profile=StudyProfile(params=params, most_replicas=8)),
        pause_seconds=pause,
        start_seconds=start,
        remaining_progress=left,
        steps_measured=50,
        since_rescale_seconds=1e4,
    ),
    views,
    params,
    st.integers(0, 6),
    st.floats(0.0, 60.0),
    st.floats(0.0, 60.0),
    st.floats(1.0, 1e6),
    st.floats(0.0, 1e5),
)


@settings(max_examples=100, deadline=None)
@given(st.lists(noisy_views, min_size=1, max_size=5, unique_by=lambda view: view.trial_id), st.sampled_from(GOALS))
def test_no_trial_grows_to_a_slower_size_or_too_late_to_gain_by_it(trials: list[TrialView], goal: Goal) -> None:
    trials = [replace(view, goal=goal, deadline_in=100.0) for view in that_fit(trials, 16)]
    grants = POLICY.allocate(snapshot(*trials, slots=16))
    for view in trials:
        held, granted = view.held_slots, grants[view.trial_id].slots
        if not max(1, view.min_slots) <= held < granted:
            continue
        assert view.model is not None and view.remaining_progress is not None
        now, then = (float(view.model.curve(16, np.array([count]))[0]) for count in (held, granted))
        assert then > now
        work = view.expected_part * view.remaining_progress
        with_change = view.start_seconds + view.pause_seconds + max(0.0, work - now * view.start_seconds) / then
        assert with_change < work / now * (1.0 + 1e-9)
        factor = float(grants[view.trial_id].reason.sentence.partition("goodput x")[2].split(";")[0])
        assert factor > 1.0
