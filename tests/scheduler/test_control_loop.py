"""The control loop over a real store and launchers without processes, in virtual time."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from scheduler.knowledge.observer import IDLE_SECONDS
from scheduler.loop.backoff import FAILED_JOIN_SECONDS
from scheduler.loop.control_loop import ControlLoop
from scheduler.loop.hands import Hands
from scheduler.loop.happenings import OWNER_LEASE_SECONDS
from scheduler.loop.settings import LoopSettings
from scheduler.policy import GoodputPolicy
from scheduler.snapshot import Grant, Snapshot
from trials.launch import InMemoryLauncher, NodeSlots
from trials.launch.base import NO_ROOM
from trials.record import Outcome, Reason, ReplicaRecord, ReplicaState, Report, Study, TrialRecord
from trials.spec import TrialSpec
from trials.states import TrialState
from trials.store import SqlTrialStore
from trials.terms import StudyTerms


class Bench:
    """A loop with its surroundings, and hands for what replicas and drivers would do."""

    def __init__(self, folder: Path, slots: int = 4) -> None:
        self.now = 1000.0
        self.jumped = 0.0
        """How far the wall clock was set forward in all."""
        self.folder = folder
        self.store = SqlTrialStore(f"sqlite:///{folder / 'trials.db'}")
        self.launcher = InMemoryLauncher({"n0": slots})
        self.policy = GoodputPolicy()
        self.loop = self.new_loop()

    def new_loop(self) -> ControlLoop:
        settings = LoopSettings(
            state_dir=self.folder,
            api_url=lambda: "http://127.0.0.1:1",
            replica_token=lambda replica_id: f"token-{replica_id}",
            base_environ={"PATH": "/bin"},
        )
        return ControlLoop(
            self.store,
            self.launcher,
            self.policy,
            settings,
            clock=lambda: self.now,
            monotonic=lambda: self.now - self.jumped,
        )

    def tick(self, times: int = 1, seconds: float = 0.5) -> None:
        for _ in range(times):
            self.loop.tick()
            self.now += seconds

    def submit(self, number: int = 0, study: str = "s", **bounds: int | bool) -> str:
        spec = TrialSpec(study=study, number=number, entrypoint="m:f", **{"max_replicas": 4, **bounds})  # type: ignore[arg-type]
        return self.store.submit(spec, self.now).trial_id

    def trial(self, trial_id: str) -> TrialRecord:
        return self.store.trial(trial_id)

    def all_ready(self, join_epoch: int | None = None) -> None:
        for replica in self.store.replicas():
            if replica.state is ReplicaState.LAUNCHED:
                epoch = join_epoch if self.trial(replica.trial_id).members else None
                self.store.update_replica(
                    replica.replica_id,
                    state=ReplicaState.READY,
                    join_epoch=epoch,
                    contact_at=self.now,
                    ready_at=self.now,
                )

    def enter(self, trial_id: str) -> None:
        """Rank 0 enters what was published; those left out go."""
        record = self.trial(trial_id)
        if record.published_members:
            self.store.note_entered(trial_id, record.published)
        for replica in self.store.replicas(trial_id=trial_id):
            if replica.replica_id not in record.published_members:
                self.launcher.end(replica.replica_id, 0)

    def train(self, trial_id: str) -> None:
        """Bring a trial to RUNNING; one that was lost may have to wait for its turn."""
        while not self.store.replicas(trial_id=trial_id):
            self.tick()
        self.all_ready()
        self.tick()
        self.enter(trial_id)
        self.tick()

    def give_hints(self, trial_id: str, replicas: int = 8, progress: float = 100.0) -> None:
        rows = [[1, count, 64, 0.08, 0.08 + 0.002 * (count > 1), 20] for count in (1, 2, replicas)]
        self.store.put_hints(
            trial_id,
            {
                "bounds": {"init_batch": 64, "max_batch": 2048, "min_atomic": 8, "max_atomic": 256},
                "observations": rows,
                "statistics": [1.0, 200.0],
                "progress": progress,
                "target_progress": 1e6,
                "goodput": 800.0,
                "epoch": 3,
            },
        )


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    made = Bench(tmp_path)
    yield made
    made.store.close()


def test_a_trial_runs_and_succeeds(bench: Bench) -> None:
    trial_id = bench.submit()
    bench.tick()
    assert bench.trial(trial_id).state is TrialState.STARTING
    assert len(bench.launcher.running) == 1
    bench.all_ready()
    bench.tick()
    assert bench.trial(trial_id).published == 1
    bench.enter(trial_id)
    bench.tick()
    assert bench.trial(trial_id).state is TrialState.RUNNING
    bench.store.set_outcome(trial_id, Outcome(kind="value", value=0.5))
    bench.tick(4)
    assert bench.trial(trial_id).state is TrialState.SUCCEEDED
    assert bench.launcher.running == {}
    states = [entry.what for entry in bench.store.history(trial_id)]
    assert states == ["starting", "running", "succeeded"]


def test_a_replica_gets_its_identity_and_its_slot(bench: Bench) -> None:
    trial_id = bench.submit()
    bench.tick()
    [request] = bench.launcher.running.values()
    assert request.replica_id.startswith(f"{trial_id}-")
    assert request.environ["ELASTUNE_REPLICA_TOKEN"] == f"token-{request.replica_id}"
    assert request.environ["ELASTUNE_TEST_SLOT"] == "n0/0"
    assert request.environ["PATH"] == "/bin"


def test_a_running_trial_grows_into_free_slots_with_a_reason(bench: Bench) -> None:
    trial_id = bench.submit()
    bench.train(trial_id)
    bench.give_hints(trial_id)
    bench.tick(30)
    assert len(bench.launcher.running) == 4
    assert bench.trial(trial_id).state is TrialState.RESCALING
    bench.all_ready(join_epoch=3)
    bench.tick()
    record = bench.trial(trial_id)
    assert len(record.published_members) == 4
    assert record.join_epoch == 3
    bench.enter(trial_id)
    bench.tick()
    assert bench.trial(trial_id).state is TrialState.RUNNING
    assert len(bench.trial(trial_id).members) == 4
    changes = [entry for entry in bench.store.history(trial_id) if entry.what == "1 -> 4 replicas"]
    assert changes[0].reason.code == "goodput_gain"


def grown(bench: Bench) -> str:
    trial_id = bench.submit()
    bench.train(trial_id)
    bench.give_hints(trial_id)
    bench.tick(30)
    bench.all_ready(join_epoch=3)
    bench.tick()
    bench.enter(trial_id)
    bench.tick()
    return trial_id


def test_joiners_that_are_not_wanted_any_more_leave_no_warning_and_no_wait(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    trial_id = bench.submit()
    bench.train(trial_id)
    bench.give_hints(trial_id)
    bench.tick(30)
    joiners = [row for row in bench.store.replicas() if row.state is ReplicaState.LAUNCHED]
    assert joiners
    asked = set()

    def stop(replica: ReplicaRecord, *, force: bool) -> None:
        asked.add(replica.replica_id)
        bench.launcher.end(replica.replica_id, None, "its pod was deleted before it had started", "cannot_start")

    monkeypatch.setattr(bench.launcher, "stop", stop)
    bench.store.hold([trial_id], "not now")
    bench.tick(20)
    assert {row.replica_id for row in joiners} <= asked
    assert "warning" not in [entry.what for entry in bench.store.history(trial_id)]
    assert trial_id not in bench.loop._backoff._until


def test_a_change_under_way_is_not_decided_anew(bench: Bench) -> None:
    bench.launcher = InMemoryLauncher({"n0": 2, "n1": 2})
    bench.loop = bench.new_loop()
    trial_id, other = bench.submit(0, max_replicas=2), bench.submit(1, max_replicas=1)
    bench.train(trial_id)
    bench.train(other)
    bench.give_hints(trial_id)
    bench.tick(20)
    # The other one is on its node, so that it goes to the other node with both replicas, and leaves its slot then.
    joiners = {row.replica_id for row in bench.store.replicas(trial_id=trial_id) if row.launch_index > 0}
    view = bench.loop.latest_views[trial_id]
    assert len(joiners) == 2
    assert (view.held_slots, view.can_rescale, view.steps_measured) == (2, False, 0)
    bench.tick(20)
    assert {row.replica_id for row in bench.store.replicas(trial_id=trial_id, live_only=False)} >= joiners
    assert len(bench.store.replicas(trial_id=trial_id, live_only=False)) == 3
    reasons = [entry.reason.code for entry in bench.store.history(trial_id) if "replicas" in entry.what]
    assert reasons == ["goodput_gain"]
    assert bench.loop.latest_grants[trial_id].reason.code == "goodput_gain"
    # It trains with three for a moment; told is the change that was decided.
    bench.all_ready(join_epoch=3)
    bench.tick()
    bench.enter(trial_id)
    bench.tick(2)
    bench.enter(trial_id)
    bench.tick(2)
    assert set(bench.trial(trial_id).members) == joiners
    assert [entry.what for entry in bench.store.history(trial_id) if "replicas" in entry.what] == ["1 -> 2 replicas"]


def test_after_a_joiner_that_found_the_trial_about_over_no_other_one_is_started(bench: Bench) -> None:
    trial_id = bench.submit()
    bench.train(trial_id)
    bench.give_hints(trial_id)
    bench.tick(30)
    for replica in bench.store.replicas(trial_id=trial_id):
        if replica.state is ReplicaState.LAUNCHED:
            bench.launcher.end(replica.replica_id, 0)
    bench.tick(10)
    assert len(bench.store.replicas(trial_id=trial_id)) == 1
    assert "warning" not in [entry.what for entry in bench.store.history(trial_id)]


def test_a_replica_waits_until_its_launcher_is_ready_for_it(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench.launcher, "is_ready_for", lambda request: False)
    trial_id = bench.submit()
    bench.tick(3)
    assert bench.store.replicas(trial_id=trial_id, live_only=False) == []
    assert bench.trial(trial_id).reason.code == "preparing"
    monkeypatch.undo()
    bench.tick()
    assert bench.trial(trial_id).state is TrialState.STARTING


def test_it_gives_slots_back_to_a_newcomer(bench: Bench) -> None:
    old = grown(bench)
    new = bench.submit(1)
    bench.tick()
    assert len(bench.trial(old).published_members) == 3
    bench.enter(old)
    bench.tick()
    bench.tick()
    assert len(bench.store.replicas(trial_id=new)) == 1
    slots = [(replica.node, replica.slot) for replica in bench.store.replicas()]
    assert len(slots) == len(set(slots)) == 4


def test_a_lost_replica_costs_the_trial_that_replica_only(bench: Bench) -> None:
    trial_id = grown(bench)
    lost = bench.trial(trial_id).members[2]
    bench.launcher.end(lost, -9)
    bench.tick()
    record = bench.trial(trial_id)
    assert record.switching
    assert lost not in record.published_members
    assert len(record.published_members) == 3
    assert record.losses == 0


def test_all_lost_resumes_and_too_often_fails_with_the_status(bench: Bench) -> None:
    trial_id = bench.submit()
    for loss in range(1, 6):
        bench.train(trial_id)
        [name] = bench.launcher.running
        bench.launcher.end(name, -9)
        bench.tick()
        record = bench.trial(trial_id)
        assert record.state in (TrialState.PAUSED, TrialState.STARTING)
        assert record.losses == loss
    bench.train(trial_id)
    [name] = bench.launcher.running
    bench.launcher.end(name, -9)
    bench.tick()
    record = bench.trial(trial_id)
    assert record.state is TrialState.FAILED
    assert "SIGKILL" in record.reason.sentence


def test_a_new_scheduler_on_the_same_store_goes_on_without_touching_anything(bench: Bench) -> None:
    trial_id = grown(bench)
    before, running = bench.trial(trial_id), set(bench.launcher.running)
    bench.loop = bench.new_loop()
    bench.tick(3)
    assert set(bench.launcher.running) == running
    assert bench.launcher.stopped == []
    assert bench.trial(trial_id).members == before.members


def test_a_study_whose_driver_is_gone_is_paused_and_comes_back(bench: Bench) -> None:
    bench.store.put_study(Study(name="s", owner="me", owner_seen_at=bench.now))
    trial_id = bench.submit()
    bench.train(trial_id)
    bench.tick(int(OWNER_LEASE_SECONDS) + 2, seconds=1.0)
    assert bench.trial(trial_id).published_members == ()
    bench.enter(trial_id)
    bench.tick(2)
    record = bench.trial(trial_id)
    assert record.state is TrialState.PAUSED
    assert record.losses == 0
    assert "resume=True" in record.reason.sentence
    bench.store.put_study(Study(name="s", owner="me again", owner_seen_at=bench.now))
    bench.tick()
    assert bench.trial(trial_id).state is TrialState.PAUSED
    bench.store.release([trial_id])
    bench.tick()
    assert bench.trial(trial_id).state is TrialState.STARTING


def test_what_was_learned_of_a_study_is_forgotten_and_learned_again(bench: Bench) -> None:
    trial_id = bench.submit()
    bench.train(trial_id)
    bench.give_hints(trial_id)
    bench.tick(3)
    bench.store.set_outcome(trial_id, Outcome(kind="value", value=1.0))
    bench.tick(3)
    learned = bench.loop._observer._histories
    assert learned["s"].fraction(trial_id) > 0.0
    bench.tick(2, seconds=IDLE_SECONDS + 1.0)
    bench.submit(study="other")
    bench.tick()
    assert "s" not in learned
    assert "s" not in bench.loop._observer._coming._studies
    later = bench.submit(1)
    bench.tick()
    assert learned["s"].fraction(trial_id) > 0.0
    assert bench.loop.latest_views[later].model is not None


def test_a_launch_that_hangs_keeps_nobody_waiting(bench: Bench) -> None:
    bench.launcher.hangs = True
    slow = bench.submit(max_replicas=1)
    bench.tick(3)
    (row,) = bench.store.replicas(trial_id=slow)
    assert row.pid is None
    assert bench.trial(slow).state is TrialState.STARTING
    bench.launcher.hangs = False
    bench.tick()
    (row,) = bench.store.replicas(trial_id=slow)
    assert row.pid is not None


def test_a_launch_that_hung_and_failed_is_tried_again(bench: Bench) -> None:
    bench.launcher.hangs = True
    trial_id = bench.submit(max_replicas=1)
    bench.tick(2)
    bench.launcher.hangs, bench.launcher.refuse = False, "no more processes"
    bench.tick()
    assert bench.store.replicas(trial_id=trial_id) == []
    assert "no more processes" in bench.trial(trial_id).reason.sentence
    bench.launcher.refuse = None
    bench.tick(10)
    assert [row.pid is not None for row in bench.store.replicas(trial_id=trial_id)] == [True]


def test_a_replica_that_was_to_stop_before_it_was_there_is_ended_when_it_is(bench: Bench) -> None:
    bench.launcher.hangs = True
    trial_id = bench.submit(max_replicas=1)
    bench.tick(2)
    bench.store.request_cancel(trial_id, "not wanted")
    bench.tick(2)
    assert bench.trial(trial_id).state is TrialState.CANCELLED
    bench.launcher.hangs = False
    bench.tick(2)
    assert bench.launcher.running == {}
    assert bench.store.replicas(trial_id=trial_id) == []


def test_the_quota_of_a_study_that_was_there_beforehand_is_for_all_that_are_called_so(bench: Bench) -> None:
    bench.store.put_study(Study(name="resnet", terms=StudyTerms(quota=3)))
    bench.store.put_study(Study(name="resnet-1", title="resnet", terms=StudyTerms(quota=2)))
    bench.store.put_study(Study(name="resnet-2", title="resnet"))
    first, second, other = bench.submit(study="resnet-1"), bench.submit(study="resnet-2"), bench.submit(study="s")
    bench.tick()
    quotas = {
        trial: [(each.name, each.slots) for each in view.quotas] for trial, view in bench.loop.latest_views.items()
    }
    shared = ("study resnet", 3)
    assert quotas == {first: [("study resnet-1", 2), shared], second: [shared], other: []}


def test_a_trial_that_nobody_waits_for_is_not_paused_when_a_driver_leaves(bench: Bench) -> None:
    bench.store.put_study(Study(name="s", owner="me", owner_seen_at=bench.now))
    of_a_sweep, by_hand = bench.submit(0, max_replicas=1), bench.submit(1, max_replicas=1, driven=False)
    bench.tick(int(OWNER_LEASE_SECONDS) + 2, seconds=1.0)
    assert [bench.trial(each).hold is None for each in (of_a_sweep, by_hand)] == [False, True]
    later = bench.submit(2, max_replicas=1, driven=False)
    bench.tick(2)
    assert bench.trial(later).state is TrialState.STARTING


def test_a_replica_that_falls_silent_is_ended_and_a_clock_that_jumps_ends_nobody(bench: Bench) -> None:
    trial_id = bench.submit()
    bench.train(trial_id)
    [replica] = bench.store.replicas()
    bench.loop.note_contact(replica.replica_id)
    bench.now += 3600.0
    bench.jumped += 3600.0
    bench.tick(20, seconds=2.0)
    assert bench.launcher.stopped == []
    bench.tick(5, seconds=2.0)
    assert bench.launcher.stopped == [(replica.replica_id, True)]
    [told] = [entry for entry in bench.store.history(trial_id) if entry.reason.code == "silent"]
    assert told.reason.sentence == f"replica {replica.replica_id} said nothing for 45 s and was ended"


def test_a_scheduler_that_was_held_up_ends_nobody_for_it(bench: Bench) -> None:
    bench.store.put_study(Study(name="s", owner="me", owner_seen_at=bench.now))
    trial_id = bench.submit()
    bench.train(trial_id)
    bench.tick()
    bench.now += 600.0
    bench.tick()
    bench.store.touch_study("s", "me", bench.now)
    bench.tick(20, seconds=0.9)
    assert bench.launcher.stopped == []
    assert bench.trial(trial_id).state is TrialState.RUNNING


def test_a_replica_that_hangs_while_the_scheduler_is_replaced_is_ended(bench: Bench) -> None:
    bench.train(bench.submit())
    bench.loop = bench.new_loop()
    bench.tick(20, seconds=2.0)
    assert bench.launcher.stopped == []
    bench.tick(5, seconds=2.0)
    assert [force for _, force in bench.launcher.stopped] == [True]


def test_slots_that_strangers_work_on_get_nothing_new(bench: Bench) -> None:
    bench.launcher.replace_nodes([NodeSlots(node="n0", slots=4, in_use=frozenset({0, 2}))])
    trials = [bench.submit(number, max_replicas=1) for number in range(4)]
    bench.tick(3)
    assert {replica.slot for replica in bench.store.replicas()} == {1, 3}
    bench.launcher.replace_nodes([NodeSlots(node="n0", slots=4, in_use=frozenset({1}))])
    bench.tick(3)
    assert {replica.slot for replica in bench.store.replicas()} == {0, 1, 2, 3}
    assert {bench.trial(trial_id).state for trial_id in trials} == {TrialState.STARTING}


def test_one_trial_that_cannot_be_handled_leaves_the_others_alone(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken, healthy = bench.submit(0), bench.submit(1)
    act_on = Hands.act_on

    def act(hands: Hands, trial: TrialRecord, *rest: Any) -> None:
        if trial.trial_id == broken:
            raise OverflowError("on purpose")
        act_on(hands, trial, *rest)

    monkeypatch.setattr(Hands, "act_on", act)
    bench.tick(3)
    assert bench.trial(healthy).state is TrialState.STARTING
    assert bench.trial(broken).state is TrialState.PENDING
    bench.tick(20)
    record = bench.trial(broken)
    assert (record.state, record.reason.code) == (TrialState.FAILED, "internal_error")
    assert "OverflowError: on purpose" in record.reason.sentence


def test_crashes_count_until_the_trial_gets_further_than_ever(bench: Bench) -> None:
    trial_id = bench.submit(max_replicas=1)
    for progress in (10.0, 9.0, 9.5, 8.0):
        bench.tick(60)
        bench.train(trial_id)
        bench.give_hints(trial_id, progress=progress)
        bench.tick()
        [name] = bench.launcher.running
        bench.launcher.end(name, 1)
        bench.tick()
    assert bench.trial(trial_id).reason.code == "crashed"


def test_joiners_who_came_too_late_are_told_to_aim_again(bench: Bench) -> None:
    trial_id = bench.submit()
    bench.train(trial_id)
    bench.give_hints(trial_id)
    bench.tick(30)
    bench.all_ready(join_epoch=3)
    bench.tick()
    bench.store.note_abandoned(trial_id, bench.trial(trial_id).published)
    bench.tick()
    record = bench.trial(trial_id)
    assert not record.switching
    joiners = [row for row in bench.store.replicas() if row.replica_id not in record.members]
    assert len(joiners) == 3
    assert all(row.retry_join and row.state is ReplicaState.LAUNCHED for row in joiners)


def test_cancelling_ends_the_replicas(bench: Bench) -> None:
    trial_id = bench.submit()
    bench.train(trial_id)
    bench.store.request_cancel(trial_id, "not needed")
    bench.tick(2)
    assert bench.trial(trial_id).state is TrialState.CANCELLED
    assert bench.launcher.running == {}


def test_an_objective_without_the_core_counts_as_running_once_it_reports(bench: Bench) -> None:
    trial_id = bench.submit()
    bench.tick()
    bench.store.add_report(Report(trial_id, 0, 0.5, 0.0))
    bench.tick()
    assert bench.trial(trial_id).state is TrialState.RUNNING


def test_replicas_that_others_left_no_room_for_are_tried_again_and_count_as_no_loss(bench: Bench) -> None:
    trial_id = bench.submit(max_replicas=1, max_losses=0)
    for _ in range(3):
        bench.tick(2)
        [replica] = bench.store.replicas()
        bench.launcher.end(replica.replica_id, None, "0/2 nodes are available: Insufficient gpu", NO_ROOM)
        bench.tick(2)
        record = bench.trial(trial_id)
        assert (record.state, record.losses) == (TrialState.PAUSED, 0)
        assert bench.store.replicas() == []
        assert "0/2 nodes are available" in bench.store.history(trial_id)[-1].reason.sentence
        bench.tick(int(FAILED_JOIN_SECONDS), seconds=1.0)
    bench.tick(2)
    bench.train(trial_id)
    assert bench.trial(trial_id).state is TrialState.RUNNING


def test_a_launch_that_fails_is_tried_again_later(bench: Bench) -> None:
    trial_id = bench.submit()
    bench.launcher.refuse = "no room on the disk"
    bench.tick()
    assert bench.trial(trial_id).state is TrialState.PENDING
    assert bench.store.replicas() == []
    bench.launcher.refuse = None
    bench.tick(10)
    assert bench.trial(trial_id).state is TrialState.STARTING


def test_a_policy_that_raises_changes_nothing(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    trial_id = grown(bench)
    before = bench.trial(trial_id)

    class Broken:
        name = "broken"

        def allocate(self, snapshot: Snapshot) -> dict[str, Grant]:
            raise RuntimeError("policy")

    bench.loop._policy = Broken()
    bench.tick(5)
    assert bench.trial(trial_id) == before
    assert len(bench.launcher.running) == 4
    assert "policy failed policy=broken" in caplog.text


@pytest.mark.parametrize("placement", [{"n0": 5}, {"n0": -1, "n1": 1}, {"nowhere": 1}])
def test_a_policy_that_grants_what_does_not_exist_changes_nothing(
    bench: Bench, caplog: pytest.LogCaptureFixture, placement: dict[str, int]
) -> None:
    trial_id = grown(bench)
    before = bench.trial(trial_id)

    class Generous:
        name = "generous"

        def allocate(self, snapshot: Snapshot) -> dict[str, Grant]:
            return {trial_id: Grant(placement=placement, reason=Reason(code="x", sentence="x"))}

    bench.loop._policy = Generous()
    bench.tick(5)
    assert bench.trial(trial_id) == before
    assert "was granted" in caplog.text


def test_a_row_without_a_process_does_not_keep_its_slot(bench: Bench) -> None:
    """What a scheduler leaves behind that was killed between writing the row and starting the process."""
    trial_id = bench.submit()
    bench.store.add_replica(
        ReplicaRecord(replica_id="ghost", trial_id=trial_id, node="n0", slot=0, launch_index=0, launched_at=bench.now)
    )
    bench.tick()
    assert [(row.slot, row.pid is not None) for row in bench.store.replicas()] == [(0, True)]
