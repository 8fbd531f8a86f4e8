"""The pieces of a trial's replica alone, where whole trainings do not show what each of them promises."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from dist_core.errors import EXIT_PREEMPTED, InvalidTraining, PeerLost, ReplicaExit
from dist_core.generations.decision import PublishedGeneration
from dist_core.generations.generation import DRY_STEPS, Generation
from dist_core.generations.group_needs import GroupNeeds
from dist_core.generations.membership import Membership, Prepared
from dist_core.generations.model_parallel import ModelParallelGroup
from dist_core.generations.process_groups import ReplicaGroup, lone_group
from dist_core.generations.running_sums import RunningSums
from dist_core.generations.step_record import Standing, StepRecord
from dist_core.generations.step_vote import StepVote, Voter
from dist_core.goodput import BatchBounds
from dist_core.life import Life
from dist_core.link.news import News
from dist_core.state.memory_limit import MemoryLimit
from dist_core.state.persistence import Persistence
from dist_core.state.position import Position
from dist_core.state.script_variables import ScriptVariables
from dist_core.state.states import FunctionState, StateRegistry
from dist_core.trial.batch_agreement import BatchAgreement
from dist_core.trial.chosen_layout import ChosenLayout
from dist_core.trial.current import get_core, presenting, reset_core
from dist_core.trial.departure import Departure, Leaving
from dist_core.trial.healing import Healing
from dist_core.trial.pacing import LoopHabits
from dist_core.trial.replica import Replica
from dist_core.trial.rollback import Rollback
from dist_core.trial.saving import Saving


def generation(number: int, *members: str, nodes: tuple[str, ...] | None = None) -> PublishedGeneration:
    return PublishedGeneration(number=number, members=members, nodes=nodes or ("n",) * len(members), join_epoch=None)


class OffersOnce:
    """A membership with one offer."""

    must_leave = None

    def __init__(self, offer: Prepared) -> None:
        self._offer: Prepared | None = offer

    def pending(self) -> Prepared | None:
        return self._offer

    def abandon(self, number: int) -> None:
        self._offer = None

    def break_off_superseded(self) -> None:
        pass

    def group_needs(self) -> GroupNeeds:
        return GroupNeeds()


def test_one_that_nobody_but_a_lost_replica_has_let_in_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """The others, who would give it the trial's state once more, are not kept waiting."""
    broken: list[ReplicaGroup] = []
    monkeypatch.setattr(ReplicaGroup, "break_off", lambda group: broken.append(group))
    present, said = Generation(), []
    present.members = ("a", "c", "j")
    group = lone_group()
    offer = Prepared(
        PublishedGeneration(number=4, members=("a", "j"), nodes=("n", "n"), join_epoch=2), group, as_joiner=True
    )
    news = cast("News", SimpleNamespace(announce=lambda path, body: said.append(path)))
    nobody = cast("Any", None)
    healing = Healing(present, cast("Membership", OffersOnce(offer)), news, nobody, nobody, Life())
    with pytest.raises(PeerLost, match="the replica that let this one join has vanished"):
        healing.heal(in_step=False)
    assert (broken[-1], said) == (group, ["/broken"])


# --------------------------------------------------------------------- the present generation


def test_a_replica_is_outside_from_its_coming_until_it_enters() -> None:
    present = Generation()
    assert (present.is_outside, present.stands_alone) == (False, True)
    present.come_to_train()
    assert (present.is_outside, present.dry_steps_left) == (True, DRY_STEPS)
    present.mark_broken("the first reason")
    present.mark_broken("another one")
    assert present.broken == "the first reason"
    group = lone_group()
    present.enter(Prepared(generation(3, "a"), group))
    entered = [present.is_outside, present.joined, present.number, present.members, present.broken, present.took_over]
    assert entered == [False, True, 3, ("a",), None, False]
    assert present.group is group


def test_what_all_do_alone_succeeds_as_it_did() -> None:
    present = Generation()
    assert [present.succeeded_everywhere(each) for each in (True, False)] == [True, False]


def test_dropping_a_group_leaves_one_that_meets_the_needs() -> None:
    present = Generation()
    present.drop(GroupNeeds(extra=2))
    assert present.group.world_size == 1
    assert len(present.group.extra) == 2


# --------------------------------------------------------------------- a step's round


class Puts(Voter):
    """A voter that writes down what it is told."""

    def __init__(self, name: str, numbers: Sequence[float], told: list[Any]) -> None:
        self.name, self._numbers, self._told = name, numbers, told
        self.times = 0

    def put(self) -> Sequence[float]:
        self.times += 1
        return self._numbers

    def take(self, agreed: Sequence[float], world_size: int) -> None:
        self._told.append(("take", self.name, list(agreed), world_size))

    def follow(self, agreed: Sequence[float]) -> None:
        self._told.append(("follow", self.name, list(agreed)))


def test_each_voter_is_told_what_came_of_its_own_numbers_in_order() -> None:
    told: list[Any] = []
    vote = StepVote(Generation())
    voters = [Puts("leave", (1.0,), told), Puts("norms", (2.0, 3.0), told), Puts("nothing", (), told)]
    vote.voters = voters
    vote.launch()
    vote.launch()
    vote.wait()
    agreed = vote.finish()
    assert agreed is not None
    assert [voter.times for voter in voters] == [1, 1, 1]
    agreed.take()
    agreed.follow()
    assert told == [
        ("take", "leave", [1.0], 1),
        ("take", "norms", [2.0, 3.0], 1),
        ("take", "nothing", [], 1),
        ("follow", "leave", [1.0]),
        ("follow", "norms", [2.0, 3.0]),
        ("follow", "nothing", []),
    ]


def test_a_round_that_fails_breaks_the_generation_and_raises_nothing() -> None:
    class Fails(Voter):
        name = "fails"

        def put(self) -> Sequence[float]:
            raise RuntimeError("connection closed")

    present = Generation()
    vote = StepVote(present)
    vote.voters = [Fails()]
    vote.launch()
    assert present.broken == "connection closed"
    assert vote.finish() is None


# --------------------------------------------------------------------- where survivors stand


def standing(**changes: Any) -> Standing:
    return Standing(**{"steps": 7, "updates": 0, "epoch": 1, "meetings": 0, "has_evaluated": False, **changes})


@pytest.mark.parametrize(
    ("mine", "furthest", "possible"),
    [
        ({}, {}, True),
        ({}, {"steps": 8}, True),
        ({}, {"steps": 8, "meetings": 1}, False),
        ({"meetings": 1}, {"meetings": 1}, True),
        ({"meetings": 1}, {"meetings": 2}, False),
        ({}, {"epoch": 2}, False),
    ],
)
def test_survivors_go_on_together_if_what_is_left_of_a_step_is_all_that_parts_them(
    mine: dict[str, Any], furthest: dict[str, Any], possible: bool
) -> None:
    assert standing(**mine).can_go_on_from(standing(**furthest)) is possible


def test_updates_that_count_are_not_made_again_when_the_body_runs_again() -> None:
    record = StepRecord()
    assert [record.counts_update() for _ in range(2)] == [True, True]
    record.go_on_from(standing(updates=record.updates))
    made = [(record.has_made_next_update, record.counts_update()) for _ in range(3)]
    assert made == [(True, False), (True, False), (False, True)]
    record.step_counts()
    assert (record.updates, record.counts_update()) == (0, True)


# --------------------------------------------------------------------- leaving


class Watched:
    """In place of a membership: what it has heard."""

    def __init__(self) -> None:
        self.must_leave: str | None = None
        self.prepared: Prepared | None = None
        self.saving = False

    def pending(self) -> Prepared | None:
        return self.prepared


def test_who_is_asked_by_anybody_leaves_and_who_is_in_no_generation_pauses() -> None:
    watched = Watched()
    leaving = Leaving(cast("Membership", watched))
    assert (leaving.must_leave, leaving.is_paused) == (False, False)
    watched.must_leave = "preempted"
    asked = [leaving.must_leave]
    watched.must_leave = None
    asked.append(leaving.must_leave)
    leaving.ask()
    asked.append(leaving.must_leave)
    assert asked == [True, False, True]
    paused = [Leaving(None).is_paused]
    for members in (("a",), ()):
        watched.prepared = Prepared(generation(2, *members), None)
        paused.append(leaving.is_paused)
    assert paused == [False, False, True]


def test_the_first_postponed_error_is_raised_once() -> None:
    leaving = Leaving(None)
    leaving.postpone(KeyError("first"))
    leaving.postpone(ValueError("second"))
    with pytest.raises(KeyError, match="first"):
        leaving.raise_postponed()
    leaving.raise_postponed()
    leaving.postpone(KeyError("of code that runs again"))
    leaving.runs_again()
    leaving.raise_postponed()


def test_who_leaves_saves_once_unless_the_trial_is_past_its_end(tmp_path: Any) -> None:
    present, position = Generation(), Position()
    present.enter_without_scheduler(None)
    registry = StateRegistry()
    registry.register("position", FunctionState(position.state_dict, position.load_state_dict))
    states = Persistence(tmp_path, registry, replicated=lambda: iter(()), on_error=pytest.fail)
    watched = Watched()
    leaving = Leaving(cast("Membership", watched))

    sums = RunningSums(present, position, registry, lambda: None)
    variables = ScriptVariables(position, lambda: lambda value: False, pytest.fail)
    rollback = Rollback(present, position, states, sums, lambda: iter(()), variables)
    saving = Saving(present, position, states)
    departure = Departure(present, leaving, saving, rollback, News(None), ModelParallelGroup(None, None))
    departure.leave_if_asked()
    leaving.ask()
    position.in_training_loop = True
    position.steps = 5
    rollback.begin_between_loops()
    position.steps = 6
    with pytest.raises(ReplicaExit, match=str(EXIT_PREEMPTED)):
        departure.leave_if_asked()
    assert (position.steps, watched.saving) == (6, True)
    position.in_training_loop = False
    with pytest.raises(ReplicaExit, match=str(EXIT_PREEMPTED)):
        departure.leave_evaluation_if_asked()
    assert position.steps == 5, "what code did behind the loop was not undone"
    position.steps = 6
    rollback.begin_between_loops()
    with pytest.raises(ReplicaExit, match=str(EXIT_PREEMPTED)):
        departure.leave_if_asked()
    states.restore_newest()
    assert position.steps == 6
    position.limit, position.epoch, position.steps = 3, 3, 9
    with pytest.raises(ReplicaExit):
        departure.leave_if_asked()
    states.restore_newest()
    assert position.steps == 6


# --------------------------------------------------------------------- states that code which runs again goes on from


def test_kept_states_are_copies_and_the_random_streams_wait_for_the_epochs() -> None:
    content = {"weight": torch.ones(2)}
    drawn = {"at": 3}
    registry = StateRegistry()
    states = Persistence(None, registry, replicated=lambda: iter(()), on_error=pytest.fail)
    registry.register("model", FunctionState(lambda: content, content.update))
    registry.register("random", FunctionState(lambda: drawn, drawn.update))
    states.keep(states.capture())
    content["weight"].zero_()
    drawn["at"] = 8
    registry.clear()
    fresh: dict[str, Any] = {}
    states.go_on_early()
    registry.register("model", FunctionState(lambda: fresh, fresh.update))
    registry.register("random", FunctionState(lambda: drawn, drawn.update))
    assert fresh["weight"].tolist() == [1.0, 1.0]
    assert (drawn["at"], states.keeps_some) == (8, True)
    states.go_on_from_kept()
    assert (drawn["at"], states.keeps_some) == (3, False)


# --------------------------------------------------------------------- the batch


def agreement(present: Generation) -> BatchAgreement:
    limit = MemoryLimit(None)
    layout = ChosenLayout(None, None, limit, 1)
    return BatchAgreement(present, StateRegistry(), limit, lambda: None, layout, node_kind="")


def test_the_batch_for_the_next_generation_rides_along() -> None:
    present = Generation()
    batch = agreement(present)
    assert list(batch.put()) == [0.0] * 4
    batch.adopt(BatchBounds(init_batch=24, max_batch=24)).proposal = lambda *_: (12, 1)  # type: ignore[method-assign]
    present.prepare(Prepared(generation(2, "a"), lone_group()))
    assert list(batch.put()) == [12.0, 1.0, 24.0, 0.0]
    assert batch.adaptation is not None
    batch.follow((0.0, 0.0, 24.0, 0.0))
    assert batch.adaptation.atomic_batch == 24
    batch.follow((12.0, 1.0, 16.0, 0.0))
    assert (batch.adaptation.atomic_batch, batch.adaptation.accumulation) == (12, 1)
    batch.use_for_next()
    assert (batch.adaptation.atomic_batch, batch.adaptation.accumulation) == (16, 0)


def test_code_that_runs_again_keeps_the_batch_within_what_memory_holds() -> None:
    batch = agreement(Generation())
    batch.adopt(BatchBounds(init_batch=32, max_batch=512, min_atomic=8, max_atomic=128)).use(64, 2)
    batch.keep()
    batch.runs_again()
    batch._registry.clear()
    adaptation = batch.adopt(BatchBounds(init_batch=32, max_batch=512, min_atomic=8, max_atomic=128))
    batch.begin()
    assert (adaptation.atomic_batch, adaptation.accumulation) == (64, 2)
    assert "from now on at most 48" in batch.shrink(RuntimeError("no room"))
    adaptation.use(8, 0)
    with pytest.raises(InvalidTraining, match="no smaller batch is allowed: no room"):
        batch.shrink(RuntimeError("no room"))


def test_habits_are_the_trials_and_a_stream_keeps_its_first_division() -> None:
    habits, resumed = LoopHabits(), LoopHabits()
    habits.note_stream_workers(4)
    habits.note_stream_workers(2)
    habits.trains_in_turns = True
    resumed.note_stream_workers(1)
    resumed.load_state_dict(habits.state_dict())
    assert (resumed.stream_workers, resumed.trains_in_turns) == (4, True)
    resumed.load_state_dict({"trains_in_turns": False})
    assert (resumed.stream_workers, resumed.trains_in_turns) == (4, False)


# --------------------------------------------------------------------- who is present


def test_one_process_may_hold_several_trials() -> None:
    reset_core()
    first, second = Replica(None), Replica(None)
    try:
        with presenting(first):
            with presenting(second):
                assert get_core() is second
            assert get_core() is first
        assert get_core() not in (first, second)
    finally:
        for core in (first, second):
            core.close()
        reset_core()


def test_a_loss_without_a_scheduler_ends_the_replica() -> None:
    core = Replica(None)
    core.generation.mark_broken("rank 1 is gone")
    with pytest.raises(PeerLost, match="rank 1 is gone"):
        core.healing.heal(in_step=True)
    core.close()
