"""The control loop over a real store and launchers without processes, in virtual time."""

from __future__ import annotations

from typing import Any

import pytest

from scheduler.knowledge.observer import IDLE_SECONDS
from scheduler.loop.observations import OWNER_LEASE_SECONDS
from tests.support.loop_bench import Bench, grown
from trials.launch import InMemoryLauncher
from trials.record import Outcome, ReplicaRecord, ReplicaState, Report, Study
from trials.states import TrialState
from trials.terms import StudyTerms


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
    assert trial_id not in bench.loop._backoff._retry_at


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
    view = bench.loop.observer.latest_views[trial_id]
    assert len(joiners) == 2
    assert (view.held_slots, view.can_rescale, view.steps_measured) == (2, False, 0)
    bench.tick(20)
    assert {row.replica_id for row in bench.store.replicas(trial_id=trial_id, live_only=False)} >= joiners
    assert len(bench.store.replicas(trial_id=trial_id, live_only=False)) == 3
    reasons = [entry.reason.code for entry in bench.store.history(trial_id) if "replicas" in entry.what]
    assert reasons == ["goodput_gain"]
    assert bench.loop.decisions.grants[trial_id].reason.code == "goodput_gain"
    # It trains with three for a moment; told is the change that was decided.
    bench.all_ready(join_epoch=3)
    bench.tick()
    bench.enter(trial_id)
    bench.tick(2)
    bench.enter(trial_id)
    bench.tick(2)
    assert set(bench.trial(trial_id).members) == joiners
    assert [entry.what for entry in bench.store.history(trial_id) if "replicas" in entry.what] == ["1 -> 2 replicas"]


def test_a_start_keeps_the_slots_that_an_ended_trials_replicas_are_just_leaving(bench: Bench) -> None:
    ended = grown(bench)
    first, *others = [row.replica_id for row in bench.store.replicas(trial_id=ended)]
    bench.store.set_outcome(ended, Outcome(kind="value", value=0.5))
    trial_id = bench.submit(1)
    bench.launcher.end(first, 0)
    bench.tick()
    assert [row.launch_index for row in bench.store.replicas(trial_id=trial_id)] == [0]
    # Another decision comes in between.
    bench.loop.decisions.decide_anew()
    bench.tick()
    for replica_id in others:
        bench.launcher.end(replica_id, 0)
    bench.tick(2)
    assert len(bench.store.replicas(trial_id=trial_id)) == 4
    bench.all_ready()
    bench.tick()
    assert len(bench.trial(trial_id).published_members) == 4


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
    learned = bench.loop.observer._histories
    assert learned["s"].fraction(trial_id) > 0.0
    bench.tick(2, seconds=IDLE_SECONDS + 1.0)
    bench.submit(study="other")
    bench.tick()
    assert "s" not in learned
    assert "s" not in bench.loop.observer._coming._studies
    later = bench.submit(1)
    bench.tick()
    assert learned["s"].fraction(trial_id) > 0.0
    assert bench.loop.observer.latest_views[later].model is not None


def test_the_quota_of_a_study_that_was_there_beforehand_is_for_all_that_are_called_so(bench: Bench) -> None:
    bench.store.put_study(Study(name="resnet", terms=StudyTerms(quota=3)))
    bench.store.put_study(Study(name="resnet-1", title="resnet", terms=StudyTerms(quota=2)))
    bench.store.put_study(Study(name="resnet-2", title="resnet"))
    first, second, other = bench.submit(study="resnet-1"), bench.submit(study="resnet-2"), bench.submit(study="s")
    bench.tick()
    quotas = {
        trial: [(each.name, each.slots) for each in view.quotas]
        for trial, view in bench.loop.observer.latest_views.items()
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


def test_what_comes_while_trials_are_read_is_decided_on_at_the_next_look(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.tick()
    # From here on only what asks for a decision leads to one.
    bench.loop.decisions.every_seconds = 1e9
    read, reads, submitted = bench.store.trials, list[None](), list[str]()

    def and_one_comes(*arguments: Any, **named: Any) -> Any:
        found = read(*arguments, **named)
        reads.append(None)
        if len(reads) == 2:
            # Behind the reading that this look decides on.
            submitted.append(bench.submit())
            bench.loop.decisions.decide_anew()
        return found

    monkeypatch.setattr(bench.store, "trials", and_one_comes)
    bench.tick()
    assert bench.launcher.running == {}
    bench.tick()
    assert len(submitted) == len(bench.launcher.running) == 1
