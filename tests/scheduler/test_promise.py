from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.knowledge.promise import Promise, Ranking, best_so_far
from trials.record import Report


def promises(rows: dict[str, list[Report]], *, maximize: bool) -> dict[str, Promise]:
    return Ranking(maximize=maximize).promises(rows, rows)


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


ROWS = st.dictionaries(
    st.sampled_from("abcdefg"),
    st.lists(st.tuples(st.floats(0, 50), st.none() | st.sampled_from([0.0, 1.0, 2.0, 3.0]))),
)


def compared_one_by_one(rows: dict[str, list[Report]], *, maximize: bool) -> dict[str, Promise]:
    """The definition, as it reads."""
    curves = {trial: best_so_far(mine, maximize=maximize) for trial, mine in rows.items()}
    found = {}
    for trial, curve in curves.items():
        wins = losses = 0
        for other, others in curves.items():
            before = [value for point, value in others if curve and point <= curve[-1][0] * (1 + 1e-9)]
            if other != trial and before:
                ahead = curve[-1][1] - before[-1] if maximize else before[-1] - curve[-1][1]
                wins, losses = wins + (ahead > 0), losses + (ahead < 0)
        if curve:
            found[trial] = Promise((wins + 1) / (wins + losses + 2), losses + 1, wins + losses + 1)
        else:
            found[trial] = Promise(0.05 if rows[trial] else 0.5, 0, 0)
    return found


@given(st.lists(ROWS, min_size=1, max_size=3), st.booleans())
def test_promises_are_those_of_the_definition_whatever_was_kept_from_before(
    looks: list[dict[str, list[tuple[float, float | None]]]], maximize: bool
) -> None:
    ranking = Ranking(maximize=maximize)
    for look in looks:
        rows = {
            trial: [Report(trial, step, value, progress) for step, (progress, value) in enumerate(mine)]
            for trial, mine in look.items()
        }
        expected = compared_one_by_one(rows, maximize=maximize)
        assert ranking.promises(rows, rows) == expected
        assert ranking.promises(rows, ["a", "new"]) == {
            "a": expected.get("a", Promise(0.5, 0, 0)),
            "new": Promise(0.5, 0, 0),
        }
