"""A trial goes on with another layout out of what its processes have in memory: each stage of it, and what is lost."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dist_core.goodput import BatchBounds, Configuration, Hints, Observation
from dist_core.goodput.layout_terms import LayoutTerms
from dist_core.layout import Layout
from scheduler.snapshot import Grant, Snapshot
from tests.support.loop_bench import Bench
from trials.plan import JOIN_DEADLINE_SECONDS, LEFT_DEADLINE_SECONDS, SWITCH_DEADLINE_SECONDS
from trials.record import Reason, ReplicaRecord, ReplicaState, TrialRecord
from trials.reshape import Seat, seats
from trials.states import TrialState

LAYOUTS = ("1", "1 recomputed", "2 sharded", "2 stages", "4 sharded")


def told(layout: str) -> Hints:
    """It may hold its model in all these ways, and has measured this one."""
    terms = [LayoutTerms(each, 1e-3 / each.slots, 1e9, 1e6) for each in map(Layout.from_name, LAYOUTS)]
    return Hints(
        bounds=BatchBounds(init_batch=64, max_batch=64, min_atomic=8),
        layout=layout,
        layouts=tuple(terms),
        slot_memory_bytes=5e9,
        observations=tuple(Observation(Configuration(1, 1, size, "", layout), 0.1, 0.1, 30) for size in (16, 32, 64)),
    )


class Wish:
    """A policy that grants what the test says."""

    name = "wish"
    slots, layout, others = 2, "2 sharded", 0

    def allocate(self, snapshot: Snapshot) -> dict[str, Grant]:
        reason = Reason(code="wish", sentence="the test wants it so")
        placement = {"n0": self.slots} if self.slots else {}
        others = {"n0": self.others} if self.others else {}
        return {
            view.trial_id: Grant(placement=placement, reason=reason, layout=self.layout)
            if view.options
            else Grant(placement=others, reason=reason)
            for view in snapshot.trials
        }


class Trial:
    """One that trains on two slots, and what its processes do."""

    def __init__(self, folder: Path, slots: int = 2, layout: str = "2 sharded", room: int = 4) -> None:
        self.bench = Bench(folder, slots=room)
        self.wish = Wish()
        self.bench.policy = self.wish  # type: ignore[assignment]  # one of its own
        self.bench.loop = self.bench.new_loop()
        self.want(slots, layout)
        self.id = self.bench.submit(max_replicas=4, replica_sizes=(1, 2, 4))  # type: ignore[arg-type]
        self.bench.train(self.id)
        assert (self.record.layout, len(self.record.members)) == (layout, slots)
        self.bench.store.put_hints(self.id, told(layout).to_json())

    def want(self, slots: int, layout: str) -> None:
        self.wish.slots, self.wish.layout = slots, layout

    @property
    def record(self) -> TrialRecord:
        return self.bench.trial(self.id)

    @property
    def rows(self) -> list[ReplicaRecord]:
        return self.bench.store.replicas(trial_id=self.id)

    @property
    def new(self) -> list[ReplicaRecord]:
        """Those that have not trained."""
        return [row for row in self.rows if row.state is ReplicaState.LAUNCHED]

    def tick(self, times: int = 1, seconds: float = 0.1) -> None:
        self.bench.tick(times, seconds)

    def stand_by(self) -> None:
        for row in self.new:
            self.bench.store.update_replica(row.replica_id, contact_at=self.bench.now, ready_at=self.bench.now)

    def enter(self) -> None:
        self.bench.store.note_entered(self.id, self.record.published)

    def stand(self) -> None:
        for row in self.rows:
            if row.stop_requested_at is None:
                self.bench.store.update_replica(row.replica_id, state=ReplicaState.READY)

    def end(self, row: ReplicaRecord | str, status: int | None = -9) -> None:
        self.bench.launcher.end(row if isinstance(row, str) else row.replica_id, status)

    def goes_on(self) -> None:
        """From where its replicas are told to end: they do, and their processes come to train as the new ones."""
        self.enter()
        self.tick(2)
        self.stand()
        self.tick()
        self.enter()
        self.tick(2)

    def offered(self) -> None:
        """Up to where its replicas are told to end."""
        self.want(4, "4 sharded")
        self.tick(2)
        self.stand_by()
        self.tick()
        assert self.record.switching and self.record.published_members == ()

    def comes_to_train(self) -> None:
        """Whatever state it is in: its processes do what they are asked."""
        for _ in range(300):
            self.bench.all_ready()
            self.tick(seconds=0.5)
            record = self.record
            if record.switching:
                self.bench.enter(self.id)
            if record.state is TrialState.RUNNING and record.layout == self.wish.layout and not record.switching:
                assert len(record.members) == self.wish.slots
                return
        raise AssertionError(str(self.record))

    def words(self) -> list[str]:
        return [f"{entry.what}: {entry.reason.sentence}" for entry in self.bench.store.history(self.id)]


@pytest.fixture
def trial(tmp_path: Path) -> Trial:
    return Trial(tmp_path)


def test_two_slots_become_four_without_an_end_of_those_that_train(trial: Trial) -> None:
    before = trial.record.members
    trial.want(4, "4 sharded")
    trial.tick(2)
    assert trial.record.members == before and not trial.record.switching, "it trains while the others come"
    third, fourth = trial.new
    environ = trial.bench.launcher.running[fourth.replica_id].environ
    name = f"{before[0]}.2"
    assert (third.launch_index, fourth.launch_index) == (2, 3)
    assert {
        key: environ[f"ELASTUNE_{key}"] for key in ("LAYOUT", "MEMBERS", "MEMBER", "WHOLE", "RESHAPE", "HOLDERS")
    } == {
        "LAYOUT": "4 sharded",
        "MEMBERS": "4",
        "MEMBER": "3",
        "WHOLE": name,
        "RESHAPE": name,
        "HOLDERS": "2",
    }
    assert environ["ELASTUNE_REPLICAS"] == "4"
    trial.tick(5)
    assert not trial.record.switching
    trial.stand_by()
    trial.tick()
    record = trial.record
    assert record.switching and record.published_members == () and record.state is TrialState.RESCALING
    reshape = trial.bench.loop.reshape_of(trial.id, record.published)
    assert reshape is not None and reshape.replicas == ((*before, third.replica_id, fourth.replica_id),)
    assert reshape.holders == before and reshape.number == record.published
    assert trial.bench.loop.reshape_of(trial.id, record.published - 1) is None
    trial.enter()
    trial.tick(2)
    assert (trial.record.layout, trial.record.members, trial.record.state.value) == ("4 sharded", (), "rescaling")
    trial.tick(5)
    assert not trial.record.switching, "not all stand at their first step"
    trial.stand()
    trial.tick()
    assert trial.record.published_members == reshape.processes
    trial.enter()
    trial.tick(2)
    record = trial.record
    assert record.members == reshape.processes and record.state is TrialState.RUNNING and record.losses == 0
    assert "1 x 2 sharded -> 1 x 4 sharded replicas: the test wants it so" in trial.words()
    assert trial.bench.launcher.stopped == []
    # And as any other from there on: a process that it loses takes the replica along.
    trial.end(record.members[3])
    trial.tick(2)
    assert len(trial.rows) == 3


def test_whoever_is_left_over_may_stay_until_the_others_train(tmp_path: Path) -> None:
    trial = Trial(tmp_path, 4, "4 sharded")
    before = trial.record.members
    trial.want(2, "2 stages")
    trial.tick()
    assert trial.record.switching and not trial.new
    trial.enter()
    trial.tick(2)
    assert trial.record.layout == "2 stages"
    trial.end(before[2], 0)
    trial.tick()
    assert trial.record.members == ()
    trial.stand()
    trial.tick()
    assert trial.record.published_members == before[:2]
    trial.enter()
    trial.bench.store.update_replica(before[3], state=ReplicaState.ACTIVE)
    trial.tick(2)
    assert trial.record.members == before[:2] and trial.bench.launcher.stopped == []
    trial.bench.now += LEFT_DEADLINE_SECONDS
    trial.tick(2)
    assert trial.bench.launcher.stopped == [(before[3], True)]
    assert trial.record.state is TrialState.RUNNING and trial.record.losses == 0


def test_replicas_change_their_number_and_their_size_at_once(tmp_path: Path) -> None:
    """Two of two become four of one, and back."""
    trial = Trial(tmp_path, 4, "2 sharded")
    before = trial.record.members
    for layout, holders in (("1", 2), ("2 sharded", 1)):
        trial.want(4, layout)
        trial.tick()
        reshape = trial.bench.loop.reshape_of(trial.id, trial.record.published)
        assert reshape is not None and reshape.processes == before and len(reshape.holders) == holders
        trial.goes_on()
        assert trial.record.members == before and trial.record.layout == layout
    assert not trial.bench.launcher.stopped


def test_what_its_replicas_said_of_the_layout_before_is_past(tmp_path: Path) -> None:
    """A layout of one slot is also the number of slots alone, of which the code says what it makes of it."""
    trial = Trial(tmp_path, 1, "1 recomputed")
    trial.want(1, "1")
    trial.tick()
    trial.enter()
    trial.tick(2)
    assert trial.record.layout == "1" and Hints.from_json(trial.bench.store.hints([trial.id])[trial.id]).layout == "1"
    trial.stand()
    trial.tick()
    trial.enter()
    trial.tick(5)
    assert trial.record.state is TrialState.RUNNING and not trial.record.switching


def test_a_new_process_that_is_lost_leaves_the_trial_as_it_is(trial: Trial) -> None:
    before = trial.record.members
    trial.want(4, "4 sharded")
    trial.tick(2)
    third, fourth = trial.new
    trial.end(third, 1)
    trial.tick()
    assert trial.record.members == before and not trial.record.switching
    assert (fourth.replica_id, True) in trial.bench.launcher.stopped
    assert any(
        "cannot go on as 4 sharded without a pause: a process that it needs was lost" in each for each in trial.words()
    )
    # Then with the pause.
    trial.comes_to_train()
    assert trial.record.losses == 0


@pytest.mark.parametrize("contact", [False, True])
def test_a_new_process_that_does_not_come_is_not_waited_for(trial: Trial, contact: bool) -> None:
    before = trial.record.members
    trial.want(4, "4 sharded")
    trial.tick(2)
    for row in trial.new:
        if contact:
            trial.bench.store.update_replica(row.replica_id, contact_at=trial.bench.now)
    trial.bench.now += JOIN_DEADLINE_SECONDS + 1
    trial.tick()
    assert trial.record.members == before and len(trial.bench.launcher.stopped) == 2
    assert any("a process that it needs did not come" in each for each in trial.words())


def test_another_decision_ends_what_has_not_been_offered(trial: Trial) -> None:
    before = trial.record.members
    trial.want(4, "4 sharded")
    trial.tick(2)
    new = [row.replica_id for row in trial.new]
    trial.want(2, "2 sharded")
    trial.tick(3)
    assert trial.record.members == before and not trial.record.switching
    assert trial.bench.launcher.stopped == [(name, True) for name in new]
    assert not any("cannot go on" in each for each in trial.words())
    trial.want(4, "4 sharded")
    trial.tick(2)
    assert len(trial.new) == 2, "it is no reason not to do it later"


@pytest.mark.parametrize("offered", [False, True])
def test_a_replica_that_is_lost_before_the_others_end_is_gone_on_without(tmp_path: Path, offered: bool) -> None:
    trial = Trial(tmp_path, 2, "1")
    before = trial.record.members
    trial.want(4, "4 sharded")
    trial.tick(2)
    if offered:
        trial.stand_by()
        trial.tick()
        assert trial.record.switching
    trial.end(before[1])
    trial.tick(3)
    record = trial.record
    assert record.published_members == before[:1] and record.layout == "1"
    assert len(trial.bench.launcher.stopped) == 2
    trial.enter()
    trial.tick(2)
    assert trial.record.members == before[:1]
    trial.comes_to_train()
    assert trial.record.losses == 0


def test_one_that_is_told_to_leave_does_so_before(tmp_path: Path) -> None:
    trial = Trial(tmp_path, 2, "1")
    before = trial.record.members
    trial.want(4, "4 sharded")
    trial.tick(2)
    trial.bench.loop.note_leaving(before[1])
    trial.tick(2)
    assert trial.record.published_members == before[:1]


def test_replicas_that_come_to_no_step_train_on_and_pause_later(trial: Trial) -> None:
    trial.offered()
    before = trial.record.members
    trial.bench.now += SWITCH_DEADLINE_SECONDS + 1
    trial.tick()
    assert trial.record.published_members == before
    trial.enter()
    trial.tick(3)
    assert trial.record.published_members == (), "as a pause"
    assert trial.bench.loop.reshape_of(trial.id, trial.record.published) is None
    trial.comes_to_train()
    # The layout is the one that it could not come to; another is tried as ever.
    trial.want(2, "2 sharded")
    trial.tick()
    assert trial.bench.loop.reshape_of(trial.id, trial.record.published) is not None


def test_code_that_cannot_run_again_ends_as_in_a_pause(trial: Trial) -> None:
    trial.offered()
    for name in trial.record.members:
        trial.end(name, 0)
    trial.tick(2)
    trial.comes_to_train()
    assert trial.record.losses == 0
    assert not any("cannot go on" in each for each in trial.words())
    # It is not asked for that again.
    trial.want(2, "2 sharded")
    trial.tick()
    assert trial.record.switching and trial.record.published_members == ()
    assert trial.bench.loop.reshape_of(trial.id, trial.record.published) is None


def test_whoever_only_leaves_may_be_gone_before_it_is_heard_that_all_have_agreed(tmp_path: Path) -> None:
    trial = Trial(tmp_path, 4, "1")
    before = trial.record.members
    trial.want(2, "2 sharded")
    trial.tick()
    reshape = trial.bench.loop.reshape_of(trial.id, trial.record.published)
    assert reshape is not None and (reshape.processes, reshape.holders) == (before[:2], before[:1])
    trial.end(before[2], 0)
    trial.end(before[3], 0)
    trial.tick(3)
    assert trial.record.published == reshape.number
    trial.goes_on()
    assert trial.record.members == before[:2] and trial.record.layout == "2 sharded"
    assert not trial.bench.launcher.stopped


@pytest.mark.parametrize("word", ["entered", "ready"])
def test_replicas_that_had_ended_when_they_were_told_to_train_on_start_from_the_checkpoint(
    trial: Trial, word: str
) -> None:
    """One is lost just behind the step; what those say of it comes when another generation is offered already."""
    trial.offered()
    number, before = trial.record.published, trial.record.members
    trial.end(trial.new[0])
    trial.tick()
    assert trial.record.published_members == before and trial.record.published == number + 1
    if word == "entered":
        trial.bench.store.note_entered(trial.id, number)
    else:
        trial.bench.store.update_replica(before[1], state=ReplicaState.READY)
    trial.tick()
    assert any("it goes on from its checkpoint" in each for each in trial.words())
    assert [(name, force) for name, force in trial.bench.launcher.stopped if name in before] == [
        (name, False) for name in before
    ]
    trial.comes_to_train()


def test_it_pauses_without_new_processes_as_well(tmp_path: Path) -> None:
    trial = Trial(tmp_path, 4, "4 sharded")
    trial.want(2, "2 sharded")
    trial.tick()
    assert trial.record.switching
    for name in trial.record.members:
        trial.end(name, 0)
    trial.tick()
    assert not any("checkpoint" in each or "cannot" in each for each in trial.words())
    trial.comes_to_train()
    trial.want(4, "4 sharded")
    trial.tick()
    assert trial.record.switching and trial.bench.loop.reshape_of(trial.id, trial.record.published) is None


def test_all_that_are_lost_at_once_go_on_from_the_checkpoint(tmp_path: Path) -> None:
    trial = Trial(tmp_path, 4, "4 sharded")
    trial.want(2, "2 sharded")
    trial.tick()
    for name in trial.record.members:
        trial.end(name)
    trial.comes_to_train()
    trial.want(4, "4 sharded")
    trial.tick()
    assert len(trial.new) == 2, "its code may well go on elsewhere"


def test_what_was_offered_is_told_to_whoever_asks_late(trial: Trial) -> None:
    trial.offered()
    number = trial.record.published
    trial.end(trial.new[0])
    trial.tick()
    assert trial.record.published == number + 1
    assert trial.bench.loop.reshape_of(trial.id, number) is not None
    assert trial.bench.loop.reshape_of(trial.id, number + 1) is None


def test_processes_of_different_age_may_end_one_after_another(trial: Trial) -> None:
    """Others of its replica do what is theirs when one has come to its end."""
    trial.offered()
    trial.goes_on()
    assert len({row.launched_at for row in trial.rows}) == 2 and trial.record.state is TrialState.RUNNING
    trial.end(trial.record.members[3], 0)
    trial.tick(80)
    assert trial.bench.launcher.stopped == []


def test_a_trial_that_was_shrunk_to_its_second_replica_is_reshaped_as_any(tmp_path: Path) -> None:
    """Its processes have the numbers that those of the new layout are to have."""
    trial = Trial(tmp_path, 4, "2 sharded")
    first = trial.record.members[:2]
    for name in first:
        trial.end(name)
    trial.tick()
    trial.enter()
    trial.want(4, "4 sharded")
    trial.tick(3)
    assert [row.launch_index for row in trial.rows] == [2, 3, 4, 5]
    # A scheduler that knows nothing of it ends those that are new, and nobody else.
    trial.bench.loop = trial.bench.new_loop()
    members = trial.record.members
    trial.tick(80)
    assert not any(name in members for name, _ in trial.bench.launcher.stopped)


def test_what_is_under_way_is_seen_as_what_it_comes_to(tmp_path: Path) -> None:
    """Slots that it gives up are nobody's to keep for it."""
    trial = Trial(tmp_path, 4, "4 sharded")
    trial.want(2, "2 sharded")
    trial.tick()
    trial.enter()
    trial.tick(2)
    assert trial.record.members == () and len(trial.rows) == 4
    snapshot = trial.bench.loop.decisions.snapshot
    assert snapshot is not None
    assert (snapshot.trials[0].placement, snapshot.trials[0].layout) == ({"n0": 2}, "2 sharded")


def test_a_layout_that_was_waited_for_once_is_none_that_is_late(trial: Trial) -> None:
    other = trial.bench.submit(number=1, max_replicas=1)
    trial.wish.others = 1
    trial.tick()
    trial.want(4, "4 sharded")
    trial.wish.others = 0
    trial.tick(5, 1.0)
    trial.want(2, "2 sharded")
    trial.tick(20, 1.0)
    for row in trial.bench.store.replicas(trial_id=other):
        trial.end(row, 0)
    trial.tick()
    trial.want(4, "4 sharded")
    trial.tick(2)
    assert len(trial.new) == 2 and not trial.record.switching


@pytest.mark.parametrize("who", [0, 3])
@pytest.mark.parametrize("formed", [False, True])
def test_what_is_lost_after_the_end_sends_the_trial_to_its_checkpoint(trial: Trial, who: int, formed: bool) -> None:
    trial.offered()
    trial.enter()
    trial.tick(2)
    processes = [row.replica_id for row in trial.rows]
    if formed:
        trial.stand()
        trial.tick()
        assert trial.record.switching
    trial.end(processes[who], 75)
    trial.tick()
    # Those that may still write its checkpoint have time for that.
    assert trial.bench.launcher.stopped == [
        (name, name not in processes[:2]) for name in processes if name != processes[who]
    ]
    for name in processes[:2]:
        trial.end(name, 143)
    assert any("it goes on from its checkpoint" in each for each in trial.words())
    trial.comes_to_train()
    assert trial.record.losses <= 1


def test_one_that_does_not_come_to_a_first_step_is_started_anew(trial: Trial) -> None:
    trial.offered()
    trial.enter()
    trial.tick(2)
    trial.bench.now += JOIN_DEADLINE_SECONDS + 1
    trial.tick()
    assert len(trial.bench.launcher.stopped) == 4
    trial.comes_to_train()


def test_it_waits_a_while_for_slots_that_others_hold(trial: Trial) -> None:
    other = trial.bench.submit(number=1, max_replicas=1)
    trial.wish.others = 1
    trial.tick()
    # It has been told to give its slot back, and does not come to do so.
    trial.wish.others = 0
    trial.want(4, "4 sharded")
    before = trial.record.members
    trial.tick(5, 1.0)
    assert (trial.record.members, trial.record.switching, len(trial.rows)) == (before, False, 2)
    trial.tick(10, 1.0)
    assert trial.record.published_members == () and trial.record.switching, "then it gives up its own"
    assert trial.bench.loop.reshape_of(trial.id, trial.record.published) is None
    assert trial.bench.store.replicas(trial_id=other)


@pytest.mark.parametrize("stage", ["coming", "offered", "ended", "standing", "formed"])
def test_a_scheduler_that_is_lost_at_any_stage_costs_no_more_than_a_start(trial: Trial, stage: str) -> None:
    trial.want(4, "4 sharded")
    trial.tick(2)
    if stage != "coming":
        trial.stand_by()
        trial.tick()
    if stage in ("ended", "standing", "formed"):
        trial.enter()
        trial.tick(2)
    if stage in ("standing", "formed"):
        trial.stand()
    if stage == "formed":
        trial.tick()
        assert trial.record.switching
    trial.bench.loop = trial.bench.new_loop()
    trial.comes_to_train()
    assert trial.record.losses <= 1


def test_a_trial_that_is_over_meanwhile_leaves_nothing(trial: Trial) -> None:
    trial.offered()
    trial.bench.store.request_cancel(trial.id, "enough")
    trial.tick(40)
    assert trial.record.state is TrialState.CANCELLED and not trial.rows
    assert trial.bench.loop.reshape_of(trial.id, trial.record.published) is None


# ---------------------------------------------------------------------- who sits where


def row(index: int, node: str) -> ReplicaRecord:
    return ReplicaRecord(replica_id=f"r{index}", trial_id="t", node=node, slot=index, launch_index=index)


def test_those_that_train_stay_where_they_are_wanted() -> None:
    members = [row(0, "b"), row(1, "b"), row(2, "a")]
    assert seats(members, {"a": 2, "b": 2, "c": 0}, 2, 4) == (
        (Seat("a", "r2"), Seat("a")),
        (Seat("b", "r0"), Seat("b", "r1")),
    )
    assert seats(members, {"c": 2, "b": 2}, 4, 3) == ((Seat("b", "r0"), Seat("b", "r1"), Seat("c"), Seat("c")),)
    assert seats(members, {"a": 3}, 2, 4) == () and seats(members, {"a": 1, "b": 1}, 2, 4) == ()


@given(
    nodes=st.lists(st.sampled_from("abcd"), max_size=8),
    wanted=st.dictionaries(st.sampled_from("abcd"), st.integers(0, 4)),
    size=st.sampled_from([1, 2, 4, 8]),
)
def test_seats_are_the_wanted_ones_and_nobody_has_two(nodes: list[str], wanted: dict[str, int], size: int) -> None:
    members = [row(index, node) for index, node in enumerate(nodes)]
    found = seats(members, wanted, size, 4)
    taken = [seat for replica in found for seat in replica]
    if found:
        assert Counter(seat.node for seat in taken) == Counter({node: count for node, count in wanted.items() if count})
    assert all(len(replica) == size for replica in found)
    staying = [seat.replica_id for seat in taken if seat.replica_id]
    assert len(set(staying)) == len(staying)
    where = {each.replica_id: each.node for each in members}
    assert all(where[seat.replica_id] == seat.node for seat in taken if seat.replica_id)
    if found:
        # Nobody leaves where a new one comes.
        there = Counter(nodes)
        assert len(staying) == sum(min(there[node], count) for node, count in wanted.items())
