from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.knowledge.promise import Promise, Ranking, best_so_far
from scheduler.knowledge.survival import Survival, rank_correlation
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


# ---------------------------------------------------------------------- which trials will be trained to their end


HALVED = Survival.of(stopped=[0.1] * 20, watched=[1.0] * 10 + [0.05] * 5)


def test_without_a_stop_everybody_goes_on() -> None:
    nobody = Survival.of([], [0.2, 1.0])
    assert nobody.probability(0.2, 0.01) == 1.0
    assert nobody.share_to_the_end(0.0) == 1.0


def test_the_share_is_that_of_those_who_were_there_to_be_stopped() -> None:
    # Thirty came that far, the five that are still before it say nothing; one imaginary one went on.
    assert HALVED.share_to_the_end(0.0) == pytest.approx(11 / 31)
    assert HALVED.share_to_the_end(0.1) == 1.0


def test_rank_decides_who_goes_on_the_more_the_later() -> None:
    chances = [HALVED.probability(0.05, quantile) for quantile in (0.05, 0.5, 0.95)]
    assert chances[0] < 0.05 < chances[1] < 0.5 < chances[2]
    assert HALVED.probability(0.001, 0.95) < chances[2]
    assert HALVED.probability(0.05, None) == HALVED.share_to_the_end(0.05)


def test_correlations_are_those_of_published_curves() -> None:
    for epoch, published in ((1, 0.74), (3, 0.84), (9, 0.91), (27, 0.98)):
        assert rank_correlation(epoch / 50) == pytest.approx(published, abs=0.05)


def test_who_will_be_stopped_stops_where_others_did() -> None:
    assert HALVED.part_until_stopped(0.0) == pytest.approx(0.1)
    assert HALVED.part_until_stopped(0.55) == pytest.approx(0.5)


parts = st.lists(st.floats(0.0, 1.0), max_size=12)


@given(parts, parts, st.floats(0.0, 1.0), st.none() | st.floats(0.01, 0.99))
def test_probabilities_are_probabilities(
    stopped: list[float], watched: list[float], fraction: float, quantile: float | None
) -> None:
    survival = Survival.of(stopped, watched)
    assert 0.0 <= survival.probability(fraction, quantile) <= 1.0
    assert 0.0 <= survival.part_until_stopped(fraction) <= 1.0
