"""What a study's goal does to who gets which slots."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, get_args

import numpy as np
import pytest

from scheduler.allocation.goals import StudyTrials, chance_to_be_best, gains
from scheduler.policy import policy_by_name
from scheduler.snapshot import Snapshot, TrialView
from tests.support.views import ONE_SLOT, running, snapshot, waiting
from trials.terms import Goal

COUNTS = np.arange(9)


def study(*views: TrialView, work: Any = 100.0) -> StudyTrials:
    return StudyTrials(
        views=views,
        speeds=np.tile(COUNTS**0.8, (len(views), 1)),
        work=np.broadcast_to(np.asarray(work, dtype=float), (len(views),)),
        price=np.ones(len(views)),
        fair_speed=np.full(len(views), 2.0),
    )


def trial(name: str, done: float, promise: float, held: int = 1, **changes: Any) -> TrialView:
    """A trial of 300 s on one slot that has done so much of it."""
    whole = 300.0 * ONE_SLOT
    view = running(name, held, promise=promise, progress=done * whole, remaining_progress=(1.0 - done) * whole)
    return replace(view, **changes)


def granted(seen: Snapshot) -> dict[str, int]:
    return {name: grant.slots for name, grant in policy_by_name("goodput").allocate(seen).items()}


@pytest.mark.parametrize("goal", get_args(Goal))
def test_more_speed_is_never_worth_less_and_nothing_is_worth_nothing(goal: Goal) -> None:
    values = gains(goal, study(trial("a", 0.2, 0.9, deadline_in=60.0), trial("b", 0.6, 0.3, deadline_in=60.0)))
    assert (np.diff(values, axis=1) >= -1e-9).all()
    assert values[:, 0] == pytest.approx(0.0)


@pytest.mark.parametrize("goal", get_args(Goal))
def test_a_goal_does_not_change_what_a_study_is_worth_as_a_whole(goal: Goal) -> None:
    values = gains(goal, study(trial("a", 0.2, 0.9), trial("b", 0.6, 0.3)))
    assert values[:, 1].sum() == pytest.approx(2.0)


def test_the_chance_to_be_best_grows_with_rank_and_gets_sharper_with_progress() -> None:
    early, late = (chance_to_be_best(trial("a", done, 0.95), 20) for done in (0.05, 0.9))
    assert chance_to_be_best(waiting("w"), 20) == pytest.approx(1 / 20)
    assert 1 / 20 < early < late
    assert chance_to_be_best(trial("a", 0.9, 0.5), 20) < chance_to_be_best(trial("a", 0.05, 0.5), 20) < 1 / 20


def test_in_a_hurry_for_the_best_result_a_promising_trial_grows_while_others_wait() -> None:
    best = trial("best", 0.7, 0.97)
    others = [trial(f"o{index}", 0.3, 0.3) for index in range(2)]
    new = [waiting(f"w{index}", model=best.model, remaining_progress=300.0 * ONE_SLOT) for index in range(2)]
    cases: tuple[tuple[Goal, bool], ...] = (("completion_time", False), ("time_to_best", True))
    for goal, grows in cases:
        views = [replace(view, goal=goal, max_slots=4) for view in (best, *others, *new)]
        found = granted(snapshot(*views, slots=4))
        assert (found["best"] > 1) == grows
        assert all(found[view.trial_id] == 1 for view in others)


def test_for_the_makespan_the_longest_trial_is_helped_first() -> None:
    short, long = trial("short", 0.9, 0.5), trial("long", 0.1, 0.5)
    found = granted(snapshot(replace(short, goal="makespan"), replace(long, goal="makespan"), slots=6))
    assert found["long"] > found["short"]


def test_fairness_gives_equal_trials_equal_shares_whatever_they_promise() -> None:
    views = [trial("a", 0.5, 0.95, goal="fairness"), trial("b", 0.5, 0.05, goal="fairness")]
    assert granted(snapshot(*views, slots=8)) == {"a": 4, "b": 4}


def test_before_a_deadline_slots_go_to_the_trial_that_can_still_be_best_in_time() -> None:
    views = [trial("good", 0.5, 0.95), trial("bad", 0.5, 0.1)]
    found = granted(snapshot(*(replace(view, goal="deadline", deadline_in=60.0) for view in views), slots=6))
    assert found["good"] > found["bad"]
    # Faster than in time is worth nothing.
    assert found["good"] == 3


def test_a_budget_is_spent_on_efficient_slots_only_and_then_nothing_runs() -> None:
    views = [trial("a", 0.5, 0.9, goal="budget", budget_left=1e4)]
    assert granted(snapshot(*views, slots=8))["a"] < granted(snapshot(trial("a", 0.5, 0.9), slots=8))["a"]
    grants = policy_by_name("goodput").allocate(snapshot(replace(views[0], budget_left=-1.0)))
    assert grants["a"].slots == 0
    assert grants["a"].reason.sentence == "its study's budget of slot-hours is used up"


def test_goals_of_two_studies_do_not_disturb_each_other() -> None:
    hurried = [trial("h0", 0.7, 0.97, study="h", goal="time_to_best"), waiting("h1", study="h", goal="time_to_best")]
    calm = [trial("c0", 0.5, 0.5, study="c"), waiting("c1", study="c")]
    found = granted(snapshot(*hurried, *calm, slots=4))
    assert found["c0"] == found["c1"] == 1
    assert found["h0"] + found["h1"] == 2
