"""The contract of every policy; what holds whatever the trials and sizes: test_whole_replicas.py."""

from __future__ import annotations

import pytest

from scheduler.simulator.rivals import COMPARED, compared_policy
from scheduler.snapshot import check_grants
from tests.support.views import running, snapshot, waiting

KEEPS_SIZE = {"fifo", "asha_static", "tiresias"}


@pytest.mark.parametrize("name", COMPARED)
def test_a_lone_trial_is_served(name: str) -> None:
    grants = compared_policy(name).allocate(snapshot(waiting("a")))
    assert grants["a"].slots == 1


@pytest.mark.parametrize("name", COMPARED)
def test_a_trial_that_is_too_large_is_told_so(name: str) -> None:
    grants = compared_policy(name).allocate(snapshot(waiting("a", min_slots=9, max_slots=9)))
    assert grants["a"].slots == 0
    assert grants["a"].reason.code == "too_large"
    assert "needs 9 slots; the cluster has 4" in grants["a"].reason.sentence


@pytest.mark.parametrize("name", COMPARED)
def test_nobody_is_starved_by_a_running_trial_that_could_shrink(name: str) -> None:
    first = running("a", 4, min_slots=4 if name in KEEPS_SIZE else 1, submitted_at=-1e4)
    grants = compared_policy(name).allocate(snapshot(first, waiting("b", submitted_at=1.0)))
    if name in KEEPS_SIZE:
        assert grants["a"].slots == 4
    else:
        assert grants["b"].slots >= 1


@pytest.mark.parametrize("name", COMPARED)
def test_slots_on_a_node_that_is_gone_are_gone(name: str) -> None:
    least = 4 if name in KEEPS_SIZE else 1
    a = running("a", placement={"n0": 2, "gone": 6}, min_slots=least, submitted_at=-1e4)
    b = running("b", placement={"gone": 1}, submitted_at=-1e4)
    seen = snapshot(a, b)
    check_grants(seen, compared_policy(name).allocate(seen))


def test_tiresias_serves_those_first_who_have_had_little() -> None:
    old = running("old", 4, min_slots=4, attained_slot_seconds=1e6)
    grants = compared_policy("tiresias").allocate(snapshot(old, waiting("new", min_slots=2, submitted_at=5.0)))
    assert (grants["old"].slots, grants["new"].slots) == (0, 2)


def test_optimus_gives_slots_where_they_shorten_the_rest_most() -> None:
    long = running("long", 1, remaining_progress=1e6, max_slots=64)
    short = running("short", 1, remaining_progress=1e3, max_slots=64)
    grants = compared_policy("optimus").allocate(snapshot(long, short))
    assert (grants["long"].slots, grants["short"].slots) == (3, 1)


def test_fair_share_and_top_job() -> None:
    seen = snapshot(running("a", 1, promise=0.9), running("b", 1, promise=0.4))
    assert {key: grant.slots for key, grant in compared_policy("fair_share").allocate(seen).items()} == {"a": 2, "b": 2}
    assert {key: grant.slots for key, grant in compared_policy("top_job").allocate(seen).items()} == {"a": 3, "b": 1}


def test_fixed_sizes_are_served_first_come_first_served_or_by_promise() -> None:
    large = waiting("large", min_slots=5, submitted_at=0.0)
    small = [waiting("x", submitted_at=1.0, promise=0.2), waiting("y", submitted_at=2.0, promise=0.8)]
    fifo = compared_policy("fifo").allocate(snapshot(large, *small))
    assert [fifo[name].slots for name in ("large", "x", "y")] == [0, 0, 0]
    static = compared_policy("asha_static").allocate(snapshot(running("r", 3, min_slots=3), *small))
    assert [static[name].slots for name in ("r", "x", "y")] == [3, 0, 1]


def test_pollux_does_not_shrink_a_trial_for_little() -> None:
    settled = [running("a", 2, submitted_at=-1e4), running("b", 2, submitted_at=-1e4)]
    grants = compared_policy("pollux").allocate(snapshot(*settled))
    assert {grant.slots for grant in grants.values()} == {2}
