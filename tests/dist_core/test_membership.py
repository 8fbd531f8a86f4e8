"""What the news of a generation means to a replica, by where it stands."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

from dist_core.channel import ControlChannel
from dist_core.env import ReplicaEnvironment
from dist_core.membership import Membership


def membership() -> Membership:
    environment = ReplicaEnvironment(
        api_url="http://127.0.0.1:9",
        token="0123456789abcdef",
        trial_id="t",
        replica_id="t-c",
        launch_index=1,
        checkpoint_dir=Path("unused"),
        node="n0",
        slot=0,
    )
    return Membership(ControlChannel(environment), environment, end=lambda status: None)


def generation(number: int, *members: str, join_epoch: int | None = None) -> dict[str, Any]:
    nodes = ["n0"] * len(members)
    return {"generation": {"number": number, "members": list(members), "nodes": nodes, "join_epoch": join_epoch}}


def waits(mine: Membership) -> list[Any]:
    """What the joiner's wait ends with within half a second."""
    ended: list[Any] = []
    thread = threading.Thread(target=lambda: ended.append(mine.wait_for_first(poll_seconds=0.01)), daemon=True)
    thread.start()
    thread.join(0.5)
    return ended


def test_a_joiner_waits_on_when_the_others_go_on_without_it() -> None:
    mine = membership()
    mine._handle(generation(2, "t-a", "t-b"))
    assert waits(mine) == []
    mine._handle(generation(3, "t-c"))
    (entered,) = waits(mine)
    assert entered.generation.number == 3 and entered.group is not None


def test_an_offer_that_a_joiner_prepared_is_dropped_with_the_next_one() -> None:
    mine = membership()
    mine._handle(generation(2, "t-c"))
    mine._handle(generation(3, "t-a", "t-b"))
    assert mine.pending() is None


def test_a_member_leaves_when_the_others_go_on_without_it() -> None:
    mine = membership()
    mine._handle(generation(1, "t-c"))
    prepared = mine.pending()
    assert prepared is not None
    mine.commit(prepared)
    mine._handle(generation(2, "t-a", "t-b"))
    leaves = mine.pending()
    assert leaves is not None and leaves.group is None


def test_a_joiner_that_is_left_out_while_it_enters_leaves_as_soon_as_it_has() -> None:
    mine = membership()
    mine._handle(generation(2, "t-c"))
    (prepared,) = waits(mine)
    mine._handle(generation(3, "t-a", "t-b"))
    assert mine.pending() is None
    mine.commit(prepared)
    leaves = mine.pending()
    assert leaves is not None and leaves.generation.number == 3 and leaves.group is None


def test_what_a_joiner_was_left_out_of_is_over_with_the_next_offer() -> None:
    mine = membership()
    mine._handle(generation(2, "t-a", "t-b"))
    mine._handle(generation(3, "t-c"))
    (prepared,) = waits(mine)
    mine.commit(prepared)
    assert mine.pending() is None


def test_a_joiner_leaves_when_its_trial_pauses() -> None:
    mine = membership()
    mine._handle(generation(2))
    (ended,) = waits(mine)
    assert ended.group is None
    mine.stop()
