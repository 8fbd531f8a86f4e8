"""What the news of a generation means to a replica, by where it stands."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import httpx2
import pytest

from dist_core.generations import process_groups
from dist_core.generations.decision import PublishedGeneration
from dist_core.generations.membership import Membership, Prepared
from dist_core.generations.process_groups import ReplicaGroup, lone_group
from tests.support.channel import REPLICA, channel_to
from tests.support.waiting import until


def membership(answer: Callable[[httpx2.Request], httpx2.Response] | None = None) -> Membership:
    """The replica t-c, its watch asleep."""
    channel = channel_to(answer or (lambda request: pytest.fail("nobody is asked here")))
    return Membership(channel, replace(REPLICA, replica_id="t-c"), end=lambda status: None)


def generation(number: int, *members: str, member: bool = False) -> dict[str, Any]:
    """``member``: whether who hears of it is in the generation that trains."""
    nodes = ["n0"] * len(members)
    document = {"number": number, "members": list(members), "nodes": nodes, "join_epoch": None, "member": member}
    return {"generation": document}


no_offer = Prepared(PublishedGeneration(number=0, members=(), nodes=(), join_epoch=None), None)


def waits(mine: Membership) -> list[Any]:
    """What the joiner's wait ends with within half a second."""
    ended: list[Any] = []
    thread = threading.Thread(target=lambda: ended.append(mine.wait_for_first(poll_seconds=0.01)), daemon=True)
    thread.start()
    thread.join(0.5)
    return ended


def test_a_joiner_waits_on_when_the_others_go_on_without_it() -> None:
    mine = membership()
    mine.handle(generation(2, "t-a", "t-b"))
    assert waits(mine) == []
    mine.handle(generation(3, "t-c"))
    (entered,) = waits(mine)
    assert entered.generation.number == 3 and entered.group is not None


def test_an_offer_that_a_joiner_prepared_is_broken_off_with_the_next_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """The others may wait in its group for the joiner already."""
    mine = membership()
    mine.handle(generation(2, "t-c"))
    prepared = mine.pending()
    assert prepared is not None and prepared.group is not None
    broken: list[ReplicaGroup] = []
    monkeypatch.setattr(ReplicaGroup, "break_off", lambda group: broken.append(group))
    mine.handle(generation(3, "t-a", "t-b"))
    assert mine.pending() is None
    assert broken == [prepared.group]


def test_a_member_waits_for_no_joiner_that_the_next_offer_leaves_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """The joiner may have left the group by itself, for a later epoch: no loss is ever told of that."""
    broken: list[ReplicaGroup] = []
    monkeypatch.setattr(ReplicaGroup, "break_off", lambda group: broken.append(group))
    mine, joining = membership(), generation(2, "t-c", "t-d", member=True)
    joining["generation"]["join_epoch"] = 4
    group = lone_group()
    monkeypatch.setattr(process_groups, "build_group", lambda *_, **__: group)
    mine.handle(joining)
    until(lambda: mine.pending() is not None)
    handing_over = mine.pending()
    mine.handle(generation(3, "t-c", member=True))
    assert broken == [group]
    assert handing_over is not None
    mine.abandon(handing_over.generation.number)
    later = mine.pending()
    assert later is not None and later.generation.number == 3, "what is offered instead is still there"


def test_an_offer_without_joiners_stays_whole_until_it_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """Others may have entered it."""
    broken: list[ReplicaGroup] = []
    monkeypatch.setattr(ReplicaGroup, "break_off", lambda group: broken.append(group))
    group = lone_group()
    monkeypatch.setattr(process_groups, "build_group", lambda *_, **__: group)
    mine = membership()
    mine.handle(generation(2, "t-c", "t-d", member=True))
    until(lambda: mine.pending() is not None)
    mine.handle(generation(3, "t-c", member=True))
    assert broken == []


def test_an_offer_that_another_came_instead_of_is_broken_off_for_who_may_wait_in_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    broken: list[ReplicaGroup] = []
    monkeypatch.setattr(ReplicaGroup, "break_off", lambda group: broken.append(group))
    groups = [lone_group() for _ in range(3)]
    built = iter(groups)
    monkeypatch.setattr(process_groups, "build_group", lambda *_, **__: next(built))
    mine = membership()
    for number in (2, 3, 4):
        mine.handle(generation(number, "t-c", "t-d", member=True))
        until(lambda number=number: (mine.pending() or no_offer).generation.number == number)  # type: ignore[misc]
    mine.break_off_superseded()
    assert broken == groups[:2]
    mine.break_off_superseded()
    assert broken == groups[:2]


def test_a_member_leaves_when_the_others_go_on_without_it() -> None:
    mine = membership()
    mine.handle(generation(1, "t-c"))
    prepared = mine.pending()
    assert prepared is not None
    mine.commit(prepared)
    mine.handle(generation(2, "t-a", "t-b", member=True))
    leaves = mine.pending()
    assert leaves is not None and leaves.group is None


def test_a_joiner_that_is_to_leave_while_it_enters_leaves_as_soon_as_it_has() -> None:
    """For the others it is a member already."""
    mine = membership()
    mine.handle(generation(2, "t-c"))
    (prepared,) = waits(mine)
    mine.handle(generation(3, "t-a", "t-b", member=True))
    mine.commit(prepared)
    leaves = mine.pending()
    assert leaves is not None and leaves.generation.number == 3 and leaves.group is None


def test_a_joiner_that_is_told_to_end_while_it_enters_has_the_others_go_on_without_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is one of several then: if it saved and left by itself, all of them would."""
    asked = threading.Event()

    def answer(request: httpx2.Request) -> httpx2.Response:
        assert request.url.path == "/replica/leaving"
        asked.set()
        return httpx2.Response(204)

    group = lone_group()
    monkeypatch.setattr(process_groups, "build_group", lambda *_, **__: group)
    mine = membership(answer)
    mine.handle(generation(2, "t-a", "t-c"))
    (prepared,) = waits(mine)
    mine.told_to_end()
    assert asked.wait(5.0)
    mine.commit(prepared)
    assert mine.must_leave is None
    mine.stop()


def test_a_replica_whose_training_waits_within_a_library_hears_that_it_is_to_end() -> None:
    """By the watch: a signal's handler runs when the library returns."""
    asked: list[str] = []

    def answer(request: httpx2.Request) -> httpx2.Response:
        asked.append(request.url.params["told"])
        return httpx2.Response(200, json={"leave": asked[-1] == "false", "generation": None})

    mine = membership(answer)
    mine.start()
    until(lambda: mine.must_leave == "preempted")
    until(lambda: "true" in asked)
    mine.stop()
    assert asked.count("false") == 1


def test_a_joiner_that_was_told_to_end_enters_nothing_any_more(monkeypatch: pytest.MonkeyPatch) -> None:
    broken: list[ReplicaGroup] = []
    monkeypatch.setattr(ReplicaGroup, "break_off", lambda group: broken.append(group))
    mine = membership()
    mine.handle(generation(2, "t-c"))
    prepared = mine.pending()
    mine.told_to_end()
    until(lambda: mine.must_leave == "preempted")
    (ended,) = waits(mine)
    assert prepared is not None
    assert ended.group is None and broken == [prepared.group]
    mine.stop()


def test_a_joiner_leaves_when_its_trial_pauses() -> None:
    mine = membership()
    mine.handle(generation(2))
    (ended,) = waits(mine)
    assert ended.group is None
    mine.stop()


def test_what_a_joiner_was_told_of_an_attempt_that_it_has_left_is_over() -> None:
    """It has run its code again by itself; once more, and the others of its replica would stand elsewhere."""
    mine = membership()
    told: list[Any] = []

    def waits_in(attempt: int) -> list[Any]:
        ended: list[Any] = []
        thread = threading.Thread(
            target=lambda: ended.append(mine.wait_for_first(attempt=attempt, poll_seconds=0.01)), daemon=True
        )
        thread.start()
        thread.join(0.3)
        told.append(thread)
        return ended

    mine.handle({"retry_join": True, "attempt": 2, "generation": None})
    assert waits_in(2) == []
    mine.handle(generation(2, "t-c"))
    told[0].join(1.0)
    again = membership()
    again.handle({"retry_join": True, "attempt": 3, "generation": None})
    mine = again
    assert waits_in(2) == [None]
    # A scheduler that has just started knows of no attempts.
    again.handle({"retry_join": True, "attempt": None, "generation": None})
    assert waits_in(7) == [None]
