from __future__ import annotations

import pytest

from scheduler.promise import best_so_far, promises
from trials.record import Report


def reports(trial: str, *values: float | None, each: float = 10.0) -> list[Report]:
    return [Report(trial, step, value, (step + 1) * each) for step, value in enumerate(values)]


def test_trials_are_compared_at_equal_progress_not_at_their_latest_value() -> None:
    """The young trial is worse than the old one's final value, but better than what that had at its age."""
    found = promises({"old": reports("old", 0.5, 0.6, 0.9), "young": reports("young", 0.7)}, maximize=True)
    assert found["young"].rank == 1
    assert found["young"].weight > 0.5


def test_direction_turns_the_order_around() -> None:
    rows = {"a": reports("a", 1.0), "b": reports("b", 2.0)}
    assert promises(rows, maximize=True)["b"].rank == 1
    assert promises(rows, maximize=False)["a"].rank == 1


def test_the_unknown_get_the_benefit_of_doubt() -> None:
    found = promises({"a": reports("a", 1.0), "new": []}, maximize=True)
    assert found["new"].weight == 0.5
    assert "nothing reported" in found["new"].sentence


def test_a_trial_that_only_reported_nan_is_unpromising() -> None:
    found = promises({"a": reports("a", 1.0), "broken": reports("broken", None, None)}, maximize=True)
    assert found["broken"].weight < 0.1


def test_promise_stays_within_bounds_and_grows_with_rank() -> None:
    rows = {f"t{index}": reports(f"t{index}", float(index)) for index in range(20)}
    weights = [promises(rows, maximize=True)[f"t{index}"].weight for index in range(20)]
    assert weights == sorted(weights)
    assert 0.0 < weights[0] < weights[-1] < 1.0


def test_best_so_far_forgets_setbacks() -> None:
    curve = best_so_far(reports("a", 0.5, 0.9, 0.2, None), maximize=True)
    assert [value for _, value in curve] == [0.5, 0.9, 0.9]
    assert curve[0][0] == pytest.approx(10.0)
