"""What the API server as a store does beyond the contract of all stores: others write there too, and it fails."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from typing import Any

import pytest

from tests.support.fake_cluster import FakeClusterApi
from trials.errors import ClusterRefused, ClusterUnreachable, InvalidTrialSpec, StoreUnavailable, UnknownTrial
from trials.kubernetes.client.api import STUDIES, TRIALS
from trials.kubernetes.names import FINALIZER
from trials.kubernetes.resources import following
from trials.kubernetes.resources import store as module
from trials.kubernetes.resources.store import KubernetesTrialStore
from trials.kubernetes.resources.writes import MOST_WRITES
from trials.kubernetes.settings import ClusterSettings
from trials.record import Outcome, Reason, ReplicaRecord, ReplicaState, Report, Study, TrialRecord
from trials.spec import TrialSpec
from trials.states import TrialState
from trials.store.base import HistoryEntry
from trials.terms import StudyTerms

SETTINGS = ClusterSettings(namespace="home", namespaces=("team",))


@contextmanager
def opened(api: FakeClusterApi, clock: Any = lambda: 100.0) -> Iterator[KubernetesTrialStore]:
    with closing(KubernetesTrialStore(api, SETTINGS, clock=clock)) as store:
        yield store


@pytest.fixture
def api() -> FakeClusterApi:
    return FakeClusterApi()


def spec(number: int = 0, study: str = "s") -> TrialSpec:
    return TrialSpec(study=study, number=number, entrypoint="m:f", payload={"x": 1.0, "none": None})


def applied(api: FakeClusterApi, name: str, namespace: str = "home", **fields: Any) -> dict[str, Any]:
    """A trial that somebody wrote by hand."""
    document = {"metadata": {"name": name}, "spec": {"command": ["python", "x.py"], **fields}}
    return api.create(TRIALS, namespace, document)


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
        store.put_hints(trial_id, {"value": 1.0, "missing": None})
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


def test_a_trial_applied_by_hand_is_taken_over_once(api: FakeClusterApi) -> None:
    with opened(api) as store:
        document = applied(api, "mnist", study="digits", maxReplicas=3)
        assert store.following.take_trial(document)
        assert not store.following.take_trial(api.get(TRIALS, "home", "mnist"))
        record = store.trial("mnist")
        assert (record.spec.study, record.spec.number, record.submitted_at) == ("digits", 0, 100.0)
        assert api.get(TRIALS, "home", "mnist")["metadata"]["finalizers"] == [FINALIZER]
        store.following.take_trial(applied(api, "next", study="digits"))
        assert store.trial("next").spec.number == 1


def test_trials_of_another_namespace_are_called_by_it(api: FakeClusterApi) -> None:
    with opened(api) as store:
        store.following.take_trial(applied(api, "mnist", "team"))
        assert store.owner_of("team.mnist").namespace == "team"
        api.create(STUDIES, "team", {"metadata": {"name": "theirs"}, "spec": {"image": "i:1"}})
        store.following.take_study(api.get(STUDIES, "team", "theirs"))
        record = store.submit(spec(study="team.theirs"), 1.0)
        owner = store.owner_of(record.trial_id)
        assert (record.trial_id, owner.namespace, owner.image) == ("team.theirs-0", "team", "i:1")
        kept = api.get(TRIALS, "team", "theirs-0")
        assert kept["metadata"]["ownerReferences"][0]["kind"] == "Study"
        assert kept["spec"]["study"] == "theirs"
    with opened(api) as successor:
        assert successor.trial(record.trial_id).spec.study == "team.theirs"


def test_a_study_of_one_namespace_is_none_of_anothers(api: FakeClusterApi) -> None:
    """Whoever may write studies in a namespace would else choose the images and secrets of others' pods."""
    template = {"spec": {"initContainers": [{"name": "evil", "image": "evil:1"}]}}
    with opened(api) as store:
        api.create(STUDIES, "team", {"metadata": {"name": "s"}, "spec": {"template": template, "image": "evil:1"}})
        # A name that looks like one in the other namespace, and one of the other namespace that looks like ours.
        api.create(STUDIES, "home", {"metadata": {"name": "lookalike"}, "spec": {"name": "team.t", "image": "evil:1"}})
        api.create(STUDIES, "team", {"metadata": {"name": "titled"}, "spec": {"title": "s", "image": "evil:1"}})
        for namespace, name in (("team", "s"), ("home", "lookalike"), ("team", "titled")):
            store.following.take_study(api.get(STUDIES, namespace, name))
        ours = store.submit(spec(study="s"), 1.0)
        theirs = store.submit(spec(study="team.t"), 1.0)
        store.following.take_trial(applied(api, "mine", study="s"))
        for trial_id in (ours.trial_id, theirs.trial_id, "mine"):
            owner = store.owner_of(trial_id)
            assert (owner.templates, owner.image) == ((), "")
        assert "team.t" in api.get(STUDIES, "home", "lookalike")["status"]["message"]
        assert store.trial("mine").spec.number == 1
        assert not store.following.take_trial(applied(api, "sneaks", study="team.s"))
        assert "begins like" in api.get(TRIALS, "home", "sneaks")["status"]["message"]


def test_a_sweep_follows_the_study_that_was_there_beforehand_under_its_name(api: FakeClusterApi) -> None:
    template = {"spec": {"nodeSelector": {"pool": "gpu"}}}
    with opened(api) as store:
        beforehand = {"template": template, "image": "i:1", "queueName": "q", "quota": 3}
        api.create(STUDIES, "team", {"metadata": {"name": "resnet"}, "spec": beforehand})
        store.following.take_study(api.get(STUDIES, "team", "resnet"))
        terms = StudyTerms(yields_to=("team.other", "near"))
        store.put_study(Study(name="team.resnet-b0c9", title="team.resnet", terms=terms))
        made = api.get(STUDIES, "team", "resnet-b0c9")
        assert (made["spec"]["name"], made["spec"]["title"]) == ("resnet-b0c9", "resnet")
        record = store.submit(spec(study="team.resnet-b0c9"), 1.0)
        owner = store.owner_of(record.trial_id)
        assert (owner.namespace, owner.image, owner.queue, owner.templates) == ("team", "i:1", "q", (template,))
        # What is changed there holds for the pods to come.
        api.patch(STUDIES, "team", "resnet", {"spec": {"image": "i:2"}})
        store.following.take_study(api.get(STUDIES, "team", "resnet"))
        assert store.owner_of(record.trial_id).image == "i:2"
        told = store.studies()
        with pytest.raises(InvalidTrialSpec, match=r"'team\.resnet' begins like"):
            store.put_study(Study(name="x", title="team.resnet"))
    with opened(api) as successor:
        assert sorted(successor.studies(), key=lambda each: each.name) == sorted(told, key=lambda each: each.name)


def test_one_that_makes_no_sense_says_so_in_its_status(api: FakeClusterApi) -> None:
    with opened(api) as store:
        assert not store.following.take_trial(applied(api, "bad", minReplicas=3, maxReplicas=1))
        status = api.get(TRIALS, "home", "bad")["status"]
        assert (status["phase"], status["reason"]) == ("Failed", "invalid")
        assert "max_replicas" in status["message"]
        calls = len(api.calls)
        assert not store.following.take_trial(api.get(TRIALS, "home", "bad"))
        assert [call for call in api.calls[calls:] if call[0] == "patch"] == []


def test_kubectl_scale_changes_the_bounds_and_nothing_else(api: FakeClusterApi) -> None:
    with opened(api) as store:
        store.following.take_trial(applied(api, "mnist", maxReplicas=1))
        changed = api.patch(TRIALS, "home", "mnist", {"spec": {"maxReplicas": 4, "study": "other"}})
        assert store.following.take_trial(changed)
        assert (store.trial("mnist").spec.max_replicas, store.trial("mnist").spec.study) == (4, "mnist")


def test_scaling_below_the_minimum_lowers_both_and_survives_a_change_of_leader(api: FakeClusterApi) -> None:
    with opened(api) as store:
        store.following.take_trial(applied(api, "mnist", minReplicas=2, maxReplicas=4))
        assert store.following.take_trial(api.patch(TRIALS, "home", "mnist", {"spec": {"maxReplicas": 1}}))
        assert (store.trial("mnist").spec.min_replicas, store.trial("mnist").spec.max_replicas) == (1, 1)
    with opened(api) as store:
        assert (store.trial("mnist").spec.min_replicas, store.trial("mnist").spec.max_replicas) == (1, 1)


def test_old_news_of_a_trial_that_was_made_anew_is_left_alone(api: FakeClusterApi) -> None:
    with opened(api) as store:
        first = applied(api, "mnist")
        first["metadata"]["creationTimestamp"] = "2025-12-31T00:00:00Z"
        del api.objects["trials", "home", "mnist"]
        second = applied(api, "mnist", maxReplicas=3)
        assert store.following.take_trial(second)
        assert not store.following.take_trial(first)
        assert store.trial("mnist").spec.max_replicas == 3


def test_one_resource_that_cannot_be_taken_over_keeps_nobody_from_working(
    api: FakeClusterApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    applied(api, "refused")
    applied(api, "fine")
    applied(api, "x" * 60)
    patch = api.patch

    def refuse(kind: Any, namespace: Any, name: str, *rest: Any) -> Any:
        if name == "refused":
            raise ClusterRefused("a webhook says no", status=403)
        return patch(kind, namespace, name, *rest)

    monkeypatch.setattr(api, "patch", refuse)
    with opened(api) as store:
        assert [record.trial_id for record in store.trials()] == ["fine"]
    assert "at most 50 lower-case letters" in api.get(TRIALS, "home", "x" * 60)["status"]["message"]


def test_a_deleted_trial_is_cancelled_first_and_goes_when_it_is_let_go(api: FakeClusterApi) -> None:
    with opened(api) as store:
        store.following.take_trial(applied(api, "mnist"))
        api.delete(TRIALS, "home", "mnist")
        assert store.following.take_trial(api.get(TRIALS, "home", "mnist"))
        record = store.trial("mnist")
        assert record.cancel_requested == "its resource was deleted"
        assert store.following.bound() == []
        store.save_trial(replace(record, state=TrialState.CANCELLED))
        assert [each.trial_id for each in store.following.bound()] == ["mnist"]
        document = api.get(TRIALS, "home", "mnist")
        store.following.let_go("mnist")
        assert ("trials", "home", "mnist") not in api.objects
        store.following.forget_trial(document)
        # Its driver still hears how it ended, for a while.
        assert store.trial("mnist").state is TrialState.CANCELLED


def test_what_is_gone_is_forgotten_in_the_end(api: FakeClusterApi) -> None:
    now = [100.0]
    with opened(api, lambda: now[0]) as store:
        document = applied(api, "mnist")
        store.following.take_trial(document)
        store.save_trial(replace(store.trial("mnist"), state=TrialState.CANCELLED))
        store.following.forget_trial(document)
        store.following.forget_gone()
        assert store.trial("mnist")
        now[0] += following.GONE_SECONDS + 1
        store.following.forget_gone()
        with pytest.raises(UnknownTrial):
            store.trial("mnist")


def test_one_whose_resource_vanished_is_cancelled(api: FakeClusterApi) -> None:
    with opened(api) as store:
        record = store.submit(spec(), 1.0)
        del api.objects["trials", "home", record.trial_id]
        store.save_trial(replace(record, state=TrialState.RUNNING))
        assert store.trial(record.trial_id).cancel_requested == "its resource was deleted"


def test_of_two_studies_with_one_name_the_first_counts(api: FakeClusterApi) -> None:
    with opened(api) as store:
        for name, weight in (("first", 2), ("second", 3)):
            document = {"metadata": {"name": name}, "spec": {"name": "same", "weight": weight}}
            store.following.take_study(api.create(STUDIES, "home", document))
        assert [study.terms.weight for study in store.studies()] == [2]
        assert "home/first" in api.get(STUDIES, "home", "second")["status"]["message"]


def test_terms_changed_with_kubectl_are_followed_and_the_drivers_lease_kept(api: FakeClusterApi) -> None:
    with opened(api) as store:
        store.put_study(Study(name="s", owner="me", owner_seen_at=5.0))
        store.touch_study("s", "me", 9.0)
        changed = api.patch(STUDIES, "home", "s", {"spec": {"weight": 4}})
        assert store.following.take_study(changed)
        (study,) = store.studies()
        assert (study.terms.weight, study.owner, study.owner_seen_at) == (4, "me", 9.0)
        store.flush()
        assert api.get(STUDIES, "home", "s")["status"]["ownerSeenAt"] == 9.0


def test_long_trials_keep_a_bounded_record(api: FakeClusterApi, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_REPORTS", 20)
    monkeypatch.setattr(module, "MOST_HISTORY", 10)
    monkeypatch.setattr(module, "MOST_ENDED_REPLICAS", 5)
    with opened(api) as store:
        trial_id = store.submit(spec(), 1.0).trial_id
        for step in range(100):
            store.add_report(Report(trial_id, step, float(step), float(step)))
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
    assert len(status["replicaRecords"]) <= 5
    with opened(api) as store:
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
