"""Who waited for what, who used how much, when a trial will start, and what a command's arguments are."""

from __future__ import annotations

import datetime
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dist_core.goodput import BatchBounds
from scheduler.knowledge.accounts import Usage, slot_hours_by_study, slot_seconds_by_trial
from scheduler.knowledge.command_lines import parameters_of, with_parameters
from scheduler.knowledge.measured import LEAST_SECONDS, MOMENTS, Measuring
from scheduler.knowledge.waiting import expected_starts, waiting_series
from scheduler.snapshot import NodeView, Snapshot, TrialView
from trials.record import Reason, ReplicaRecord, ReplicaState, TrialRecord
from trials.spec import TrialSpec
from trials.store import sql_store
from trials.store.base import HistoryEntry, SlotInterval

UTC = datetime.timezone.utc


def record(trial_id: str, submitted_at: float = 0.0, finished_at: float | None = None, study: str = "s") -> TrialRecord:
    spec = TrialSpec(study=study, number=0, entrypoint="m:f")
    return TrialRecord(trial_id=trial_id, spec=spec, submitted_at=submitted_at, finished_at=finished_at)


def entry(trial_id: str, at: float, what: str, code: str = "c") -> HistoryEntry:
    return HistoryEntry(at=at, trial_id=trial_id, what=what, reason=Reason(code=code, sentence="s"))


def held(trial_id: str, began: float, ended: float | None, slot: int = 0) -> SlotInterval:
    return SlotInterval(
        node="n", slot=slot, trial_id=trial_id, replica_id=f"{trial_id}-{slot}", began=began, ended=ended
    )


# ---------------------------------------------------------------------- waiting


def test_waiting_is_counted_by_reason_until_a_trial_holds_a_slot() -> None:
    history = [
        entry("a", 2.0, "waits", "no_free_slot"),
        entry("a", 6.0, "starting"),
        entry("a", 7.0, "running"),
        entry("a", 8.0, "warning"),
        entry("a", 8.0, "paused", "gives_way"),
        entry("a", 9.0, "starting"),
        entry("a", 10.0, "succeeded"),
    ]
    series = waiting_series([record("a", 0.0, 10.0)], history[::-1], 99.0, bins=10)
    assert series.at == pytest.approx(list(range(1, 11)))
    assert series.reasons["submitted"] == [1, 1, 0, 0, 0, 0, 0, 0, 0, 0]
    assert series.reasons["no_free_slot"] == [0, 0, 1, 1, 1, 1, 0, 0, 0, 0]
    assert series.reasons["gives_way"] == [0, 0, 0, 0, 0, 0, 0, 0, 1, 0]


def test_a_trial_that_waits_still_is_counted_until_now_and_nothing_comes_of_nothing() -> None:
    series = waiting_series([record("a")], [entry("a", 1.0, "waits", "held")], 4.0, bins=4)
    assert series.reasons == {"held": [0, 1, 1, 1], "submitted": [1, 0, 0, 0]}
    assert waiting_series([], [], 4.0, bins=4).at == []


def test_what_began_before_the_oldest_entry_that_was_read_is_left_out() -> None:
    entries = [entry("b", 6.0, "starting"), entry("b", 5.0, "waits", "held")]
    trials = [record("a", 0.0, 9.0), record("b", 5.0, 9.0)]
    assert set(waiting_series(trials, entries, 9.0, bins=4, cut=True).reasons) == {"held"}
    assert "submitted" in waiting_series(trials, entries, 9.0, bins=4).reasons


@given(
    st.lists(st.tuples(st.floats(0, 100), st.sampled_from(["waits", "starting", "paused", "running", "warning"]))),
    st.integers(1, 30),
)
def test_a_trial_waits_for_one_thing_at_a_time(changes: list[tuple[float, str]], bins: int) -> None:
    history = [entry("a", at, what) for at, what in sorted(changes, reverse=True)]
    series = waiting_series([record("a", 0.0, 100.0)], history, 100.0, bins=bins)
    total = np.sum(list(series.reasons.values()), axis=0)
    assert np.all(total <= 1.0 + 1e-3)


# ---------------------------------------------------------------------- slot hours


def test_slot_hours_fall_on_the_days_that_they_were_held_on() -> None:
    day = 86400.0
    intervals = [held("a", day - 3600.0, day + 7200.0), held("a", day, day + 1800.0, 1), held("b", 0.0, None)]
    found = slot_hours_by_study([record("a"), record("b", study="t")], intervals, 3600.0, zone=UTC)
    rows = [(row.day, row.study, row.hours, row.trials) for row in found]
    assert rows == [("1970-01-01", "s", 1.0, 1), ("1970-01-01", "t", 1.0, 1), ("1970-01-02", "s", 2.5, 1)]
    assert slot_hours_by_study([], intervals, 3600.0, zone=UTC) == []


@given(st.lists(st.tuples(st.floats(0, 1e6), st.floats(0, 1e6)), max_size=20))
def test_no_slot_second_is_lost_between_days(spans: list[tuple[float, float]]) -> None:
    intervals = [held("a", began, began + length, slot) for slot, (began, length) in enumerate(spans)]
    hours = sum(row.hours for row in slot_hours_by_study([record("a")], intervals, 0.0, zone=UTC))
    assert hours * 3600.0 == pytest.approx(sum(length for _, length in spans), abs=1e-3)
    assert slot_seconds_by_trial(intervals, 0.0).get("a", 0.0) == pytest.approx(hours * 3600.0, abs=1e-3)


# ---------------------------------------------------------------------- expected starts


class Linear:
    """Goodput of one example a second and slot."""

    kind = ""
    bounds = BatchBounds(init_batch=1, max_batch=1, min_atomic=1, max_atomic=1)
    most_profiled = 8
    most_useful = 8.0

    def on(self, kind: str) -> Linear:
        return self

    def curve(self, node_slots: int, counts: np.ndarray) -> np.ndarray:
        return counts.astype(float)


def view(name: str, at: float, *, slots: int = 0, left: float | None = None, needs: int = 1) -> TrialView:
    return TrialView(
        trial_id=name,
        study="s",
        min_slots=needs,
        max_slots=8,
        placement={"n": slots} if slots else {},
        model=Linear() if left is not None else None,
        remaining_progress=left,
        submitted_at=at,
    )


def starts(*trials: TrialView, slots: int = 4) -> dict[str, float]:
    return expected_starts(Snapshot(now=0.0, nodes=(NodeView(name="n", slots=slots),), trials=trials))


def test_who_waits_starts_when_enough_slots_come_free_in_order() -> None:
    found = starts(
        view("a", 0.0, slots=2, left=20.0),
        view("b", 1.0, slots=2, left=60.0),
        view("c", 2.0, needs=2),
        view("d", 3.0, needs=3),
        view("e", 4.0),
    )
    # a ends after 10 s, b after 30 s; c takes as long as these do on average, 20 s.
    assert found == {"c": 10.0, "d": 30.0, "e": 30.0}


def test_where_nothing_is_known_nothing_is_said() -> None:
    assert starts(view("a", 0.0, slots=4), view("b", 1.0)) == {}
    assert starts(view("a", 0.0, slots=2, left=20.0), view("b", 1.0, slots=2), view("c", 2.0, needs=4)) == {}
    assert starts() == {}
    assert all(math.isfinite(seconds) for seconds in starts(view("a", 0.0, slots=4, left=8.0), view("b", 1.0)).values())


# ---------------------------------------------------------------------- moments


def test_a_trial_leaves_few_moments_however_long_it_takes() -> None:
    measuring, kept, now = Measuring(), 0, 0.0
    while now < 30 * 86400.0:
        kept += measuring.take("a", now, 1)
        now += max(0.5, now / 5000.0)
    assert 500 < kept < 3000
    assert measuring.take("b", 0.0, 1)
    assert not measuring.take("b", LEAST_SECONDS / 2, 1)
    assert measuring.take("b", LEAST_SECONDS / 2, 2), "another size is kept at once"
    assert MOMENTS > 100
    measuring.forget("b")
    assert measuring.take("b", 0.0, 1)


# ---------------------------------------------------------------------- commands


def test_arguments_are_read_as_people_write_them() -> None:
    command = ["python", "-m", "train", "--lr", "0.1", "--name=a b", "--fast", "-n", "3", "momentum=0.9", "+x.y=1", "f"]
    assert parameters_of(command) == {
        "lr": 0.1,
        "name": "a b",
        "fast": True,
        "n": 3,
        "momentum": 0.9,
        "x.y": 1,
    }
    assert parameters_of(["train", "--shift", "-3", "--flag", "true"]) == {"shift": -3, "flag": True}
    assert parameters_of([]) == {}


def test_arguments_are_changed_in_place() -> None:
    command = ["train", "--lr", "0.1", "--name=a", "x=1", "--fast"]
    changed = with_parameters(command, {"lr": 0.5, "name": "b c", "x": 2})
    assert changed == ["train", "--lr", "0.5", "--name=b c", "x=2", "--fast"]
    for wrong in ({"depth": 1}, {"fast": 2}):
        with pytest.raises(ValueError, match=r"no 'depth'|without a value"):
            with_parameters(command, wrong)


@given(
    st.dictionaries(
        st.from_regex(r"[a-z][a-z_]{0,8}", fullmatch=True), st.floats(allow_nan=False, allow_infinity=False)
    )
)
def test_what_was_changed_is_what_is_read(values: dict[str, float]) -> None:
    command = ["train", *(word for name in values for word in (f"--{name}", "0"))]
    assert parameters_of(with_parameters(command, values)) == pytest.approx(values)


# ---------------------------------------------------------------------- what trials have had so far


def test_what_comes_and_goes_between_two_looks_counts_as_long_as_it_was_there(tmp_path: Path) -> None:
    store = sql_store(f"sqlite:///{tmp_path / 'trials.db'}")
    usage = Usage(store)

    def look(now: float) -> tuple[float, float, float]:
        rows: dict[str, list[ReplicaRecord]] = {}
        for row in store.replicas():
            rows.setdefault(row.trial_id, []).append(row)
        usage.look(rows, {trial.trial_id: "s" for trial in store.trials(live_only=True)}, now)
        return usage.of_study("s"), usage.of_trial(first.trial_id), usage.served_seconds(first.trial_id)

    def replica(trial: TrialRecord, name: str, began: float) -> None:
        store.add_replica(
            ReplicaRecord(
                replica_id=name, trial_id=trial.trial_id, node="n", slot=0, launch_index=0, launched_at=began, pid=1
            )
        )

    first, second = (store.submit(TrialSpec(study="s", number=each, entrypoint="m:f"), 0.0) for each in range(2))
    assert look(0.0) == (0.0, 0.0, 0.0)
    replica(first, "a", 1.0)
    assert look(3.0) == (2.0, 2.0, 2.0)
    assert look(4.0) == (3.0, 3.0, 3.0)
    replica(first, "b", 4.0)
    store.update_replica("a", state=ReplicaState.GONE, gone_at=4.5)
    store.update_replica("b", state=ReplicaState.GONE, gone_at=6.0)
    # It comes and goes between two looks, and so does its trial.
    replica(second, "c", 4.0)
    store.update_replica("c", state=ReplicaState.GONE, gone_at=4.25)
    usage.note_end(second)
    assert look(9.0) == (5.75, 5.5, 5.0)
    assert look(20.0) == (5.75, 5.5, 5.0)
    again = Usage(store)
    again.look({}, {}, 20.0)
    assert (again.of_study("s"), again.of_trial(first.trial_id)) == (5.75, 5.5)
    store.close()
