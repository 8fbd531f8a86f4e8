"""What the API server as a store does beyond the contract of all stores: others write there too, and it fails."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any

import pytest

from tests.support.fake_cluster import FakeClusterApi
from tests.support.kubernetes_store import SETTINGS, opened, spec
from trials.errors import ClusterRefused, ClusterUnreachable, StoreUnavailable
from trials.kubernetes.client.api import TRIALS
from trials.kubernetes.resources import backing as module
from trials.kubernetes.resources.backing import MOST_WRITES
from trials.kubernetes.resources.store import KubernetesTrialStore
from trials.record import Measurement, Outcome, Reason, ReplicaRecord, ReplicaState, Report, Study, TrialRecord
from trials.states import TrialState
from trials.store.base import HistoryEntry


def test_a_successor_finds_everything(api: FakeClusterApi) -> None:
    with opened(api) as store:
        store.put_study(Study(name="s", direction="maximize", owner="me", owner_seen_at=5.0))
        record = store.submit(spec(), 1.0)
        trial_id = record.trial_id
        store.add_replica(ReplicaRecord(replica_id="r1", trial_id=trial_id, node="n", slot=0, launch_index=0))
        store.add_replica(ReplicaRecord(replica_id="r2", trial_id=trial_id, node="n", slot=1, launch_index=1))
        store.update_replica("r1", state=ReplicaState.GONE, gone_at=4.0, exit_status=-9)
        store.update_replica("r2", contact_at=3.5, pid=1)
        store.add_report(Report(trial_id, 1, 0.1 + 0.2, 10.0))
        measured = moment(trial_id, 3.25)
        store.put_hints(trial_id, {"value": 1.0, "missing": None}, measured)
        entry = HistoryEntry(at=2.0, trial_id=trial_id, what="running", reason=Reason(code="c", sentence="s"))
        store.add_history(entry)
        store.save_trial(replace(record, state=TrialState.RUNNING, members=("r2",), generation=2))
        store.set_outcome(trial_id, Outcome(kind="value", value={"list": [1.0, None]}))
        before = store.trial(trial_id), store.replicas(live_only=False), store.studies()
    with opened(api) as store:
        assert (store.trial(trial_id), store.replicas(live_only=False), store.studies()) == before
        assert store.trial(trial_id).spec.payload == {"x": 1.0, "none": None}
        assert [row.replica_id for row in store.replicas()] == ["r2"]
        assert store.reports("s") == [Report(trial_id, 1, 0.1 + 0.2, 10.0)]
        assert store.hints([trial_id]) == {trial_id: {"value": 1.0, "missing": None}}
        assert store.history(trial_id) == [entry]
        assert store.measurements(trial_id) == [measured]


def moment(trial_id: str, at: float) -> Measurement:
    return Measurement(
        trial_id=trial_id, at=at, progress=0.1 + 0.2, replicas=2, batch=32, goodput=8.5, pause_seconds=0.05
    )


def test_what_matters_is_written_before_the_call_returns(api: FakeClusterApi) -> None:
    with opened(api) as store:
        trial_id = store.submit(spec(), 1.0).trial_id
        store.set_outcome(trial_id, Outcome(kind="value", value=0.5))
        successor = KubernetesTrialStore(api, SETTINGS)
        assert successor.trial(trial_id).outcome == Outcome(kind="value", value=0.5)
        successor.close()


def test_of_many_trials_each_is_written_less_often_and_nothing_is_left_out(
    api: FakeClusterApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The API server has others to serve; what is noted while a trial waits for its turn goes with it."""
    with opened(api) as store:
        ids = [store.submit(spec(number), 1.0).trial_id for number in range(MOST_WRITES + 5)]
        store.flush()
        rests: list[float] = []

        def rest(seconds: float) -> bool:
            rests.append(seconds)
            if len(rests) == 1:
                for trial_id in ids:
                    store.add_report(Report(trial_id, 2, 0.5, 1.0))
            return False

        monkeypatch.setattr(store._resources._closed, "wait", rest)
        for trial_id in ids:
            store.add_report(Report(trial_id, 1, 0.5, 1.0))
        before = len(api.calls)
        store.flush()
        monkeypatch.undo()
        assert len(api.calls) - before == len(ids)
        assert sum(rests) == pytest.approx(len(ids) / MOST_WRITES)
        both = [{"1", "2"} == set(api.get(TRIALS, "home", trial_id)["status"]["reports"]) for trial_id in ids]
        assert both.count(False) == 1, "the first one was written before the others had more to say"
    assert all(len(api.get(TRIALS, "home", trial_id)["status"]["reports"]) == 2 for trial_id in ids)


def test_hints_alone_are_written_twice_a_minute(api: FakeClusterApi) -> None:
    """Every write is one of the whole object, of hundreds of kilobytes for a trial that has been running for long."""
    now = [100.0]
    with opened(api, clock=lambda: now[0]) as store:
        trial_id = store.submit(spec(), 1.0).trial_id
        store.flush()
        before = len(api.calls)
        for step in range(240):
            store.put_hints(trial_id, {"step": step})
            store.flush()
            now[0] += 0.5
        assert len(api.calls) - before == 4
        assert store.hints([trial_id]) == {trial_id: {"step": 239}}
    assert api.get(TRIALS, "home", trial_id)["status"]["hints"] == '{"step": 239}'


def test_hints_and_history_travel_with_the_next_change(api: FakeClusterApi) -> None:
    with opened(api) as store:
        trial_id = store.submit(spec(), 1.0).trial_id
        before = len(api.calls)
        for number in range(50):
            store.put_hints(trial_id, {"step": number})
        assert len(api.calls) - before <= 2
        store.add_report(Report(trial_id, 1, 0.5, 10.0))
        store.set_outcome(trial_id, Outcome(kind="value", value=0.5))
        status = api.get(TRIALS, "home", trial_id)["status"]
        assert (status["hints"], status["reports"]) == ('{"step": 49}', {"1": "0.5 10.0"})


def test_a_change_whose_answer_is_lost_is_looked_up(api: FakeClusterApi) -> None:
    with opened(api) as store:
        record = store.submit(spec(), 1.0)
        api.lose_answers = True
        with pytest.raises(StoreUnavailable):
            store.set_outcome(record.trial_id, Outcome(kind="value", value=1.0))
        api.lose_answers = False
        # It had got through: the first outcome stays.
        assert not store.set_outcome(record.trial_id, Outcome(kind="error", message="later"))
        assert store.trial(record.trial_id).outcome == Outcome(kind="value", value=1.0)


def test_of_several_changes_those_that_got_through_are_seen(
    api: FakeClusterApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    patch = api.patch

    def fail_for_the_second(*arguments: Any) -> Any:
        if arguments[2] == second:
            raise ClusterUnreachable("away")
        return patch(*arguments)

    with opened(api) as store:
        first, second = (store.submit(spec(number), 1.0).trial_id for number in range(2))
        with monkeypatch.context() as patched:
            patched.setattr(api, "patch", fail_for_the_second)
            with pytest.raises(StoreUnavailable):
                store.hold([first, second], "why")
        store.put_parameters(first, {"x": 1.0})
        assert (store.trial(first).hold, store.trial(second).hold) == ("why", None)


def test_while_the_server_is_away_nothing_is_believed(api: FakeClusterApi) -> None:
    with opened(api) as store:
        record = store.submit(spec(), 1.0)
        api.down = True
        with pytest.raises(StoreUnavailable):
            store.save_trial(replace(record, state=TrialState.RUNNING))
        store.put_hints(record.trial_id, {"a": 1})
        assert store.trial(record.trial_id).state is TrialState.PENDING
        api.down = False
        store.save_trial(replace(record, state=TrialState.RUNNING))
        assert store.trial(record.trial_id).state is TrialState.RUNNING
        assert api.get(TRIALS, "home", record.trial_id)["status"]["hints"] == '{"a": 1}'


def test_a_replica_that_reports_does_not_wait_for_a_request_that_hangs(
    api: FakeClusterApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    patch, hangs, go_on = api.patch, threading.Event(), threading.Event()

    def hang(*arguments: Any) -> Any:
        hangs.set()
        assert go_on.wait(10.0)
        return patch(*arguments)

    with opened(api) as store:
        trial_id = store.submit(spec(), 1.0).trial_id
        store.add_replica(ReplicaRecord(replica_id="r1", trial_id=trial_id, node="n", slot=0, launch_index=0))
        store.put_hints(trial_id, {"step": 1})
        monkeypatch.setattr(api, "patch", hang)
        writer = threading.Thread(target=store.set_outcome, args=(trial_id, Outcome(kind="value", value=0.5)))
        writer.start()
        assert hangs.wait(10.0)

        def tell() -> None:
            store.add_report(Report(trial_id, 1, 0.5, 10.0))
            store.put_hints(trial_id, {"step": 2})
            store.update_replica("r1", contact_at=7.0)
            store.add_history(
                HistoryEntry(at=2.0, trial_id=trial_id, what="waits", reason=Reason(code="c", sentence="s"))
            )

        teller = threading.Thread(target=tell)
        teller.start()
        teller.join(5.0)
        assert not teller.is_alive()
        assert writer.is_alive()
        go_on.set()
        writer.join(5.0)
    status = api.get(TRIALS, "home", trial_id)["status"]
    assert (status["hints"], status["reports"]) == ('{"step": 2}', {"1": "0.5 10.0"})
    assert status["replicaRecords"]["r1"]["contact_at"] == 7.0
    assert len(status["history"]) == 1
    assert status["record"]["outcome"]


def test_what_was_noted_before_and_during_a_failed_write_is_sent_with_the_next(
    api: FakeClusterApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(api) as store:
        record = store.submit(spec(), 1.0)
        store.put_hints(record.trial_id, {"step": 1})
        store.add_report(Report(record.trial_id, 1, 0.5, 10.0))

        def fail(*_: Any) -> Any:
            store.put_hints(record.trial_id, {"step": 2})
            raise ClusterUnreachable("away")

        with monkeypatch.context() as patched:
            patched.setattr(api, "patch", fail)
            with pytest.raises(StoreUnavailable):
                store.request_cancel(record.trial_id, "why")
        store.flush()
        status = api.get(TRIALS, "home", record.trial_id)["status"]
        assert (status["hints"], status["reports"]) == ('{"step": 2}', {"1": "0.5 10.0"})
        assert store.hints([record.trial_id]) == {record.trial_id: {"step": 2}}
        assert store.trial(record.trial_id).cancel_requested is None


def test_a_server_that_does_not_serve_trials_yet_deletes_none(
    api: FakeClusterApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unknown(*_: Any) -> Any:
        raise ClusterRefused("404 page not found", status=404)

    with opened(api) as store:
        record = store.submit(spec(), 1.0)
        with monkeypatch.context() as patched:
            patched.setattr(api, "patch", unknown)
            with pytest.raises(StoreUnavailable, match="404 page not found"):
                store.save_trial(replace(record, state=TrialState.RUNNING))
        assert store.trial(record.trial_id).cancel_requested is None
        store.save_trial(replace(record, state=TrialState.RUNNING))
        assert store.trial(record.trial_id).state is TrialState.RUNNING


def test_submitting_again_after_a_lost_answer_gives_the_same_trial(api: FakeClusterApi) -> None:
    with opened(api) as store:
        api.lose_answers = True
        with pytest.raises(StoreUnavailable):
            store.submit(spec(), 1.0)
        api.lose_answers = False
        record = store.submit(spec(), 2.0)
        assert store.trials() == [record]


def test_long_trials_keep_a_bounded_record(api: FakeClusterApi, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_REPORTS", 20)
    monkeypatch.setattr(module, "MOST_HISTORY", 10)
    monkeypatch.setattr(module, "MOST_MEASUREMENTS", 20)
    monkeypatch.setattr(module, "MOST_ENDED_REPLICAS", 5)
    with opened(api) as store:
        trial_id = store.submit(spec(), 1.0).trial_id
        for step in range(100):
            store.add_report(Report(trial_id, step, float(step), float(step)))
            store.put_hints(trial_id, {"step": step}, moment(trial_id, float(step)))
            reason = Reason(code="c", sentence=str(step))
            store.add_history(HistoryEntry(at=step, trial_id=trial_id, what="waits", reason=reason))
            replica = ReplicaRecord(
                replica_id=f"r{step}", trial_id=trial_id, node="n", slot=0, launch_index=0, launched_at=step
            )
            store.add_replica(replica)
            store.update_replica(f"r{step}", state=ReplicaState.GONE, gone_at=step + 1.0)
    status = api.get(TRIALS, "home", trial_id)["status"]
    assert len(status["reports"]) <= 20
    assert "99" in status["reports"]
    assert len(status["history"]) == 10
    assert 10 <= len(status["measurements"]) <= 20
    assert len(status["replicaRecords"]) <= 5
    with opened(api) as store:
        moments = [each.at for each in store.measurements(trial_id)]
        assert len(moments) == len(status["measurements"]) and moments == sorted(moments) and moments[-1] == 99.0
        assert store.history(trial_id)[-1].reason.sentence == "99"
        reason = Reason(code="c", sentence="after")
        store.add_history(HistoryEntry(at=200.0, trial_id=trial_id, what="waits", reason=reason))
    with opened(api) as store:
        assert [entry.reason.sentence for entry in store.history(trial_id)[-2:]] == ["99", "after"]


def test_history_is_told_as_events(api: FakeClusterApi) -> None:
    with opened(api) as store:
        trial_id = store.submit(spec(), 1.0).trial_id
        reason = Reason(code="cannot_start", sentence="no such image")
        store.add_history(HistoryEntry(at=5.0, trial_id=trial_id, what="warning", reason=reason))
        store.flush()
    (event,) = [document for (plural, _, _), document in api.objects.items() if plural == "events"]
    assert (event["type"], event["reason"], event["message"]) == ("Warning", "CannotStart", "warning: no such image")


def test_a_record_of_an_unknown_replica_changes_nothing(api: FakeClusterApi) -> None:
    with opened(api) as store:
        record: TrialRecord = store.submit(spec(), 1.0)
        before = api.get(TRIALS, "home", record.trial_id)
        store.update_replica("nobody", pid=3)
        store.set_replica_state(["nobody"], ReplicaState.ACTIVE)
        assert api.get(TRIALS, "home", record.trial_id) == before
