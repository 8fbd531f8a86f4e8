"""What is known of agents from what they say, with a clock of the test's own."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trials.agents import roster as roster_module
from trials.agents.launcher import ORPHAN_SECONDS, AgentLauncher
from trials.agents.roster import Lost, Roster
from trials.agents.words import AgentReplica, AgentSlot, News, Phase
from trials.record import ReplicaRecord


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def go_on(self, seconds: float, roster: Roster) -> None:
        """With a look in each second, as a scheduler that is not held up has them."""
        end = self.now + seconds
        while self.now < end:
            self.now = min(end, self.now + 1.0)
            roster.lose_silent()


def news(agent: str = "a", host: str = "n1", slots: int = 2, version: int = 1, **changes: Any) -> News:
    slot = AgentSlot(environ={"CUDA_VISIBLE_DEVICES": agent})
    return replace(News(agent=agent, host=host, version=version, slots=(slot,) * slots), **changes)


def row(replica_id: str = "r", node: str = "n1", slot: int = 0) -> ReplicaRecord:
    return ReplicaRecord(replica_id=replica_id, trial_id="t", node=node, slot=slot, launch_index=0, pid=7)


def running(*replicas: str) -> Mapping[str, AgentReplica]:
    return {name: AgentReplica(phase=Phase.RUNNING, pid=7) for name in replicas}


def test_agents_of_one_host_are_one_node_and_keep_their_numbers() -> None:
    roster = Roster()
    roster.hear(news("a"))
    roster.hear(news("b", slots=1))
    roster.hear(news("c", host="n10", slots=1))
    roster.hear(news("d", host="n2", slots=1))
    assert [(node.node, node.slots) for node in roster.nodes()] == [("n1", 3), ("n2", 1), ("n10", 1)]
    assert roster.slot_environ("n1", 2) == {"CUDA_VISIBLE_DEVICES": "b"}
    roster.lose("a", "gone")
    (first, *_) = roster.nodes()
    assert first.slots == 3 and first.in_use == {0, 1}
    roster.hear(news("e"))
    assert roster.orders("e").numbers == (0, 1)
    assert roster.orders("b").numbers == (2,)


def test_an_agent_that_comes_back_to_another_scheduler_has_the_numbers_it_had() -> None:
    roster = Roster()
    roster.hear(news("b", slots=1, numbers=(2,), replicas=running("r")))
    roster.hear(news("a"))
    assert roster.orders("b").numbers == (2,)
    assert roster.orders("a").numbers == (0, 1)


def test_an_order_is_repeated_until_the_agent_speaks_of_it() -> None:
    roster = Roster()
    told: list[str] = []
    roster.on_orders = told.append
    roster.hear(news())
    assert roster.order("n1", 1, "r", {"replica_id": "r"})
    assert told == ["a"]
    before = roster.version("a")
    for _ in range(2):
        assert [each["replica_id"] for each in roster.orders("a").launch] == ["r"]
    state = roster.state_of("r")
    assert isinstance(state, AgentReplica) and state.phase is Phase.STARTING
    roster.hear(news(version=2, replicas=running("r")))
    assert roster.orders("a").launch == ()
    assert roster.version("a") == before
    assert not roster.order("n1", 2, "s", {}) and not roster.order("n2", 0, "s", {})


def test_what_is_heard_late_changes_nothing() -> None:
    roster = Roster()
    roster.hear(news(version=5, replicas=running("r")))
    roster.hear(news(version=4))
    assert roster.running() == {"r": "a"}


def test_a_replica_of_an_agent_that_is_gone_is_lost_with_the_reason() -> None:
    clock = Clock()
    roster = Roster(monotonic=clock)
    launcher = AgentLauncher(roster, monotonic=clock)
    roster.hear(news(job="12", replicas=running("r")))
    assert launcher.exits([row()]) == []
    clock.go_on(roster_module.QUIET_SECONDS + 1.0, roster)
    assert launcher.nodes()[0].in_use == {0, 1}, "nothing new is started with one that is quiet"
    assert launcher.exits([row()]) == []
    clock.go_on(roster_module.LOST_SECONDS, roster)
    (gone,) = launcher.exits([row()])
    assert (gone.status, gone.code) == (None, "node_lost")
    assert gone.why == "the agent of n1 of job 12 has not called for 41 s"
    assert launcher.nodes() == []


def test_one_that_closes_its_line_is_gone_soon_unless_it_calls_again() -> None:
    clock = Clock()
    roster = Roster(monotonic=clock)
    for back in (True, False):
        roster.hear(news(replicas=running("r")))
        roster.note_hung_up("a", clock.now)
        clock.go_on(roster_module.HUNG_UP_SECONDS / 2, roster)
        if back:
            roster.hear(news(replicas=running("r")))
        clock.go_on(roster_module.HUNG_UP_SECONDS + 1.0, roster)
        assert (len(roster.agents()) == 1) is back


def test_after_a_start_replicas_of_before_are_waited_for_and_then_given_up() -> None:
    clock = Clock()
    roster = Roster(monotonic=clock)
    launcher = AgentLauncher(roster, monotonic=clock)
    roster.expect([row("r", slot=3), row("s", node="n2")])
    assert [(node.node, node.slots, len(node.in_use)) for node in launcher.nodes()] == [("n1", 4, 4), ("n2", 1, 1)]
    assert launcher.exits([row("r"), row("s", node="n2")]) == []
    roster.hear(news(slots=4, numbers=(0, 1, 2, 3), replicas=running("r")))
    clock.now += roster_module.RETURN_SECONDS
    roster.hear(news(slots=4, numbers=(0, 1, 2, 3), replicas=running("r"), version=2))
    (gone,) = launcher.exits([row("r"), row("s", node="n2")])
    assert gone.replica_id == "s" and gone.code == "node_lost"
    assert [node.node for node in launcher.nodes()] == ["n1"]


def test_an_end_is_told_until_it_is_noted() -> None:
    roster = Roster()
    launcher = AgentLauncher(roster)
    ended = {"r": AgentReplica(phase=Phase.ENDED, pid=7, status=3)}
    roster.hear(news(replicas=ended))
    for _ in range(2):
        (gone,) = launcher.exits([row()])
        assert gone.status == 3
    assert roster.orders("a").noted == ()
    launcher.exits([])
    assert roster.orders("a").noted == ("r",)
    roster.hear(news(version=2))
    assert roster.orders("a").noted == ()


def test_an_end_that_nobody_could_read_before_the_agent_was_gone_is_a_loss() -> None:
    roster = Roster()
    launcher = AgentLauncher(roster)
    roster.hear(news(replicas={"r": AgentReplica(phase=Phase.ENDED, pid=7, status=0)}))
    roster.lose("a", "job 12 is gone")
    (gone,) = launcher.exits([row()])
    assert (gone.status, gone.why) == (None, "job 12 is gone")


def test_replicas_that_no_record_names_are_ended_after_a_while() -> None:
    clock = Clock()
    roster = Roster(monotonic=clock)
    launcher = AgentLauncher(roster, monotonic=clock)
    roster.hear(news(replicas=running("r", "stray")))
    launcher.exits([row()])
    assert roster.orders("a").stop == {}
    clock.now += ORPHAN_SECONDS
    launcher.exits([row()])
    assert roster.orders("a").stop == {"stray": True}


def test_a_stop_is_told_once_more_when_it_is_by_force() -> None:
    roster = Roster()
    roster.hear(news(replicas=running("r")))
    versions = [roster.version("a")]
    for force in (False, False, True, True, False):
        roster.stop("r", force=force)
        versions.append(roster.version("a"))
    assert [after - before for before, after in itertools.pairwise(versions)] == [1, 0, 1, 0, 0]
    assert roster.orders("a").stop == {"r": True}


def test_an_agent_that_leaves_starts_nothing_more() -> None:
    roster = Roster()
    roster.hear(news(leaves="its job is being ended", replicas=running("r")))
    assert roster.nodes()[0].in_use == {0, 1}
    assert not roster.order("n1", 0, "s", {})
    assert not roster.all_have_left
    roster.hear(news(leaves="its job is being ended", version=2))
    assert roster.all_have_left


def test_what_was_to_start_with_an_agent_that_is_gone_has_failed() -> None:
    roster = Roster()
    roster.hear(news())
    roster.order("n1", 0, "r", {})
    roster.lose("a", "cancelled")
    lost = roster.state_of("r")
    assert isinstance(lost, Lost) and lost.why == "cancelled"


def test_news_that_cannot_be_are_refused() -> None:
    for wrong in ({"agent": ""}, {"host": ""}, {"slots": (AgentSlot(),) * 5000}):
        with pytest.raises(ValueError, match=r"an agent (must have a name|has 5000 slots .* it must have at most)"):
            replace(news(), **wrong)


def test_a_scheduler_that_was_held_up_itself_loses_nobody() -> None:
    clock = Clock()
    roster = Roster(monotonic=clock)
    roster.hear(news(replicas=running("r")))
    clock.go_on(3.0, roster)
    roster.note_hung_up("a", clock.now)
    clock.now += 10.0 * roster_module.LOST_SECONDS
    roster.lose_silent()
    assert len(roster.agents()) == 1
    clock.go_on(roster_module.LOST_SECONDS + 2.0, roster)
    assert roster.agents() == []


def test_a_line_that_was_closed_before_the_agent_called_again_says_nothing() -> None:
    clock = Clock()
    roster = Roster(monotonic=clock)
    roster.hear(news())
    waited_since = clock.now
    clock.go_on(2.0, roster)
    roster.hear(news())
    roster.note_hung_up("a", waited_since)
    clock.go_on(roster_module.HUNG_UP_SECONDS + 2.0, roster)
    assert len(roster.agents()) == 1


def test_an_agent_that_comes_back_after_all_gets_nothing_new_until_what_it_has_is_ended() -> None:
    roster = Roster()
    launcher = AgentLauncher(roster)
    roster.hear(news(replicas=running("r")))
    roster.lose("a", "no word")
    assert launcher.exits([row()])[0].why == "no word"
    roster.hear(news(version=2, replicas=running("r")))
    launcher.exits([])
    assert roster.orders("a").stop == {"r": True}
    assert roster.nodes()[0].in_use == {0, 1} and not roster.order("n1", 0, "s", {})
    roster.hear(news(version=3, replicas={"r": AgentReplica(phase=Phase.ENDED, pid=7, status=-9)}))
    assert roster.nodes()[0].in_use == frozenset()


def test_one_that_comes_back_has_its_numbers_before_one_that_has_nothing_yet() -> None:
    roster = Roster()
    roster.hear(news("fresh"))
    assert roster.orders("fresh").numbers == (0, 1)
    roster.hear(news("back", slots=4, numbers=(0, 1, 2, 3), replicas=running("r")))
    assert roster.orders("back").numbers == (0, 1, 2, 3)
    assert roster.orders("fresh").numbers == (4, 5)


def test_nothing_new_is_started_beside_replicas_whose_slots_are_not_known() -> None:
    roster = Roster()
    roster.hear(news("fresh", replicas=running("s")))
    roster.hear(news("back", numbers=(0, 1), replicas=running("r")))
    assert roster.orders("back").numbers == (2, 3)
    assert roster.nodes()[0].in_use == {2, 3}
    roster.hear(news("back", version=2))
    assert roster.nodes()[0].in_use == frozenset()


def test_an_agent_that_cannot_see_the_state_folder_gets_nothing() -> None:
    roster = Roster()
    roster.hear(news(shares_files=False))
    assert roster.nodes()[0].in_use == {0, 1} and not roster.order("n1", 0, "r", {})


@given(
    st.lists(
        st.tuples(st.sampled_from("abc"), st.sampled_from(["n1", "n2"]), st.integers(1, 3), st.booleans()), max_size=12
    )
)
def test_no_two_agents_have_the_same_slot(steps: list[tuple[str, str, int, bool]]) -> None:
    roster = Roster()
    sizes: dict[str, tuple[str, int]] = {}
    for agent, host, slots, goes in steps:
        if goes:
            roster.lose(agent, "gone")
            sizes.pop(agent, None)
        elif agent not in sizes:
            sizes[agent] = host, slots
            roster.hear(news(agent, host, slots))
        given_out = [(host, number) for name, (host, _) in sizes.items() for number in roster.orders(name).numbers]
        assert len(given_out) == len(set(given_out)) == sum(count for _, count in sizes.values())
        free = {(node.node, slot) for node in roster.nodes() for slot in range(node.slots) if slot not in node.in_use}
        assert free == set(given_out)
