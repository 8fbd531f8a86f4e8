"""The scheduler is killed before or after each single thing that a tick does, and another takes over; its clock jumps.

Three trials on four slots start, grow, shrink, lose a replica and end, in virtual time with a launcher without
processes. Whatever the point: every trial ends with its value, no slot is held twice, nothing is left.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dist_core.errors import EXIT_PREEMPTED
from scheduler.api.service import SteadyClock
from scheduler.loop.control_loop import ControlLoop
from scheduler.loop.settings import LoopSettings
from scheduler.snapshot import Grant, Snapshot
from trials.launch import InMemoryLauncher
from trials.record import Outcome, Reason, ReplicaState
from trials.spec import TrialSpec
from trials.states import TrialState
from trials.store import TrialStore

WRITES = (
    "save_trial",
    "add_history",
    "add_replica",
    "update_replica",
    "set_replica_state",
    "hold",
)
CALLS = ("launch", "stop")
SLOTS = 4
ROUNDS = 150


class Killed(BaseException):
    """Nothing in the loop may catch it."""


class Guillotine:
    """Counts what the loop does, and kills it at one of these."""

    def __init__(self, at: int, *, after: bool) -> None:
        self.at = at
        self.after = after
        self.count = 0
        self.armed = False

    def around(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **fields: Any) -> Any:
            if not self.armed:
                return method(*args, **fields)
            self.count += 1
            number = self.count
            if number == self.at and not self.after:
                raise Killed
            result = method(*args, **fields)
            if number == self.at:
                raise Killed
            return result

        return call


class Scripted:
    """Grows the first trial, then gives its slots to the others, then takes one of them off for a while."""

    name = "scripted"

    def __init__(self, now: Callable[[], float]) -> None:
        self.now = now

    def allocate(self, snapshot: Snapshot) -> dict[str, Grant]:
        wanted = [2, 1, 0] if self.now() < 1040 else [4, 0, 0] if self.now() < 1080 else [1, 2, 1]
        return {
            view.trial_id: Grant(
                placement={"n0": count} if count else {}, reason=Reason(code="script", sentence=f"gets {count}")
            )
            for view, count in zip(sorted(snapshot.trials, key=lambda each: each.trial_id), wanted, strict=False)
        }


class World:
    def __init__(self, folder: Path, at: int = 0, *, after: bool = False) -> None:
        self.folder = folder
        self.now = 1000.0
        self.jumped = 0.0
        """How far the machine's clock was set forward."""
        self.store = TrialStore()
        self.launcher = InMemoryLauncher({"n0": SLOTS})
        self.guillotine = Guillotine(at, after=after)
        for target, names in ((self.store, WRITES), (self.launcher, CALLS)):
            for name in names:
                setattr(target, name, self.guillotine.around(getattr(target, name)))
        self.trained: dict[str, int] = {}
        self.kills = 0
        self.lost = False
        self.loop = self.new_loop()
        self.trials = [
            self.store.submit(TrialSpec(study="s", number=number, entrypoint="m:f", max_replicas=4), self.now).trial_id
            for number in range(3)
        ]

    def new_loop(self) -> ControlLoop:
        settings = LoopSettings(
            state_dir=self.folder,
            api_url=lambda: "http://127.0.0.1:1",
            replica_token=lambda replica_id: replica_id,
            base_environ={},
        )

        def passed() -> float:
            return self.now

        clock = SteadyClock(lambda: self.now + self.jumped, passed)
        return ControlLoop(self.store, self.launcher, Scripted(passed), settings, clock=clock, monotonic=passed)

    def tick(self) -> None:
        self.guillotine.armed = True
        try:
            self.loop.tick()
        except Killed:
            self.kills += 1
            self.loop = self.new_loop()
        finally:
            self.guillotine.armed = False

    def replicas_act(self) -> None:
        """What the processes would do by themselves between two ticks."""
        rows = {row.replica_id: row for row in self.store.replicas()}
        for name in [name for name in self.launcher.running if name not in rows]:
            # The API knows no such replica; it leaves.
            self.launcher.end(name, 0)
        for trial_id in self.trials:
            trial = self.store.trial(trial_id)
            mine = [
                row for row in rows.values() if row.trial_id == trial_id and row.replica_id in self.launcher.running
            ]
            if trial.outcome is not None or trial.state.is_final:
                for row in mine:
                    self.launcher.end(row.replica_id, 0)
                continue
            for row in mine:
                if row.state is ReplicaState.LAUNCHED:
                    epoch = 0 if trial.members else None
                    self.store.update_replica(
                        row.replica_id,
                        state=ReplicaState.READY,
                        contact_at=self.now,
                        ready_at=self.now,
                        join_epoch=epoch,
                        retry_join=False,
                    )
                self.loop.liveness.note(row.replica_id)
            if trial.switching and trial.entered < trial.published:
                stay = set(trial.published_members)
                if stay <= {row.replica_id for row in mine}:
                    if stay:
                        self.store.note_entered(trial_id, trial.published)
                    for row in mine:
                        if row.replica_id not in stay and row.replica_id in trial.members:
                            self.launcher.end(row.replica_id, EXIT_PREEMPTED if not stay else 0)
            elif trial.members and not trial.switching:
                self.trained[trial_id] = self.trained.get(trial_id, 0) + 1
                if self.trained[trial_id] >= 25:
                    self.store.set_outcome(trial_id, Outcome(kind="value", value=float(trial.spec.number)))
                elif not self.lost and len(trial.members) == 4 and self.trained[trial_id] > 8:
                    self.lost = True
                    self.launcher.end(trial.members[1], -9)

    def run(self, before: Callable[[int], None] = lambda number: None) -> None:
        for number in range(ROUNDS):
            before(number)
            self.tick()
            self.replicas_act()
            self.now += 2.0
            ended = all(self.store.trial(name).state.is_final for name in self.trials)
            if ended and not self.store.replicas() and not self.launcher.running:
                return


def assert_whole(world: World) -> None:
    for number, name in enumerate(world.trials):
        trial = world.store.trial(name)
        assert trial.state is TrialState.SUCCEEDED, (number, trial.state, trial.reason)
        assert trial.outcome is not None and trial.outcome.value == float(number)
        assert trial.losses == 0
    assert world.store.replicas() == []
    assert world.launcher.running == {}
    intervals = sorted(world.store.slot_intervals(), key=lambda row: (row.slot, row.began))
    for before, after in itertools.pairwise(intervals):
        assert before.slot != after.slot or (before.ended is not None and before.ended <= after.began)


def test_the_story_itself_has_everything_in_it(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.run()
    assert_whole(world)
    assert world.lost
    sizes = [entry.what for entry in world.store.resizes()]
    assert {"2 -> 3 replicas", "4 -> 3 replicas", "1 -> 0 replicas"} <= set(sizes)
    assert any(entry.what == "paused" for entry in world.store.history(world.trials[1]))


@pytest.mark.parametrize("after", [False, True], ids=["before it", "after it"])
def test_a_scheduler_killed_at_any_point_of_a_tick_loses_nothing(tmp_path: Path, after: bool) -> None:
    story = World(tmp_path)
    story.run()
    points = story.guillotine.count
    assert points > 40
    for at in range(1, points + 1):
        world = World(tmp_path, at, after=after)
        world.run()
        assert world.kills == 1
        try:
            assert_whole(world)
        except AssertionError as error:
            raise AssertionError(f"killed at point {at} of {points}: {error}") from error


@pytest.mark.parametrize("restarts", [False, True], ids=["goes on", "restarts"])
@pytest.mark.parametrize("jump", [3600.0, -3600.0])
def test_a_clock_that_jumps_at_any_time_loses_nothing(tmp_path: Path, jump: float, restarts: bool) -> None:
    for at in range(60):
        world = World(tmp_path)

        def jumps(number: int, world: World = world, at: int = at) -> None:
            if number == at:
                world.jumped = jump
                world.loop = world.new_loop() if restarts else world.loop

        world.run(jumps)
        trials = [world.store.trial(name) for name in world.trials]
        assert [trial.state for trial in trials] == [TrialState.SUCCEEDED] * 3, (at, [t.reason for t in trials])
        assert world.store.replicas() == [] and world.launcher.running == {}
