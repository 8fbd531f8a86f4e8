"""The contract of every trial store."""

from __future__ import annotations

import os
import subprocess
import threading
from collections.abc import Iterator
from contextlib import closing
from dataclasses import fields, replace
from pathlib import Path

import pytest
import sqlalchemy as sa

from tests.support.fake_cluster import FakeClusterApi
from tests.support.postgres import postgres_server
from tests.support.project import ROOT
from trials.errors import StateFolderInUse, StoreUnavailable, UnknownTrial
from trials.kubernetes.client.api import STUDIES, TRIALS, KubernetesApi
from trials.kubernetes.resources.store import KubernetesTrialStore
from trials.kubernetes.settings import ClusterSettings
from trials.record import FACTS, Measurement, Outcome, Reason, ReplicaRecord, ReplicaState, Report, Study, TrialRecord
from trials.spec import TrialSpec
from trials.states import TrialState
from trials.store import TrialStore, sql_store
from trials.store.base import HistoryEntry
from trials.store.sql import SqlBacking
from trials.terms import StudyTerms


@pytest.fixture(scope="module")
def postgres() -> Iterator[str]:
    with postgres_server() as url:
        yield url


def emptied(url: str) -> str:
    """The server's database without any table."""
    engine = sa.create_engine(url)
    with engine.begin() as connection:
        connection.exec_driver_sql("DROP SCHEMA public CASCADE")
        connection.exec_driver_sql("CREATE SCHEMA public")
    engine.dispose()
    return url


@pytest.fixture(scope="module")
def defined() -> Iterator[KubernetesApi]:
    """The API server that KUBECONFIG names, with our definitions while the tests last."""
    files = ROOT / "deploy" / "helm" / "elastune" / "files"
    for verb in ("apply", "delete"):
        done = subprocess.run(
            ["kubectl", verb, "-f", str(files / "trials.yaml"), "-f", str(files / "studies.yaml")],
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode == 0, done.stderr
        if verb == "apply":
            subprocess.run(["kubectl", "wait", "--for=condition=established", "crd/trials.elastune.dev"], check=True)
            yield KubernetesApi.connect()


@pytest.fixture
def real_api(defined: KubernetesApi) -> Iterator[KubernetesApi]:
    yield defined
    for kind in (TRIALS, STUDIES):
        for document in defined.list(kind, "default")["items"]:
            name = document["metadata"]["name"]
            defined.delete(kind, "default", name)
            if document["metadata"].get("finalizers"):
                defined.patch(kind, "default", name, {"metadata": {"finalizers": None}})


@pytest.fixture(params=["file", pytest.param("server", marks=pytest.mark.slow)])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """An empty database that several stores may open."""
    return (
        f"sqlite:///{tmp_path / 'trials.db'}"
        if request.param == "file"
        else emptied(request.getfixturevalue("postgres"))
    )


@pytest.fixture(
    params=[
        "sqlite-file",
        "sqlite-memory",
        "memory",
        "kubernetes",
        pytest.param("postgresql", marks=pytest.mark.slow),
        # What KUBECONFIG asks for is its owner's business.
        pytest.param("cluster", marks=[pytest.mark.cluster, pytest.mark.filterwarnings("ignore:Unverified HTTPS")]),
    ],
)
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[TrialStore]:
    if request.param == "memory":
        yield TrialStore()
        return
    if request.param in ("kubernetes", "cluster"):
        api = FakeClusterApi() if request.param == "kubernetes" else request.getfixturevalue("real_api")
        with closing(KubernetesTrialStore(api, ClusterSettings())) as kept:
            yield kept
        return
    if request.param == "postgresql":
        sql = sql_store(emptied(request.getfixturevalue("postgres")))
    else:
        sql = sql_store("sqlite://" if request.param == "sqlite-memory" else f"sqlite:///{tmp_path / 'trials.db'}")
    yield sql
    sql.close()


def spec(number: int = 0, study: str = "s") -> TrialSpec:
    return TrialSpec(study=study, number=number, entrypoint="m:f", payload={"x": 1.5})


def test_submitting_the_same_trial_twice_gives_the_first(store: TrialStore) -> None:
    first = store.submit(spec(), 1.0)
    assert store.submit(spec(), 2.0) == first
    assert store.submit(spec(study="other"), 2.0).trial_id != first.trial_id
    assert [record.submitted_at for record in store.trials()] == [1.0, 2.0]


def test_what_the_loop_saves_comes_back(store: TrialStore) -> None:
    record = store.submit(spec(), 1.0)
    changed = replace(
        record,
        state=TrialState.RESCALING,
        reason=Reason(code="c", sentence="why"),
        generation=3,
        members=("a", "b"),
        published=4,
        published_members=("a",),
        published_at=5.0,
        join_epoch=6,
        rescaled_at=7.0,
        losses=1,
    )
    store.save_trial(changed)
    assert store.trial(record.trial_id) == changed


def test_saving_an_old_copy_does_not_undo_facts(store: TrialStore) -> None:
    record = store.submit(spec(), 1.0)
    assert store.set_outcome(record.trial_id, Outcome(kind="value", value=0.25))
    store.note_entered(record.trial_id, 3)
    store.note_abandoned(record.trial_id, 2)
    store.request_cancel(record.trial_id, "enough")
    store.hold([record.trial_id], "held")
    store.put_parameters(record.trial_id, {"lr": 0.1})
    store.save_trial(record)
    now = store.trial(record.trial_id)
    assert (now.entered, now.abandoned, now.cancel_requested, now.hold) == (3, 2, "enough", "held")
    assert now.outcome == Outcome(kind="value", value=0.25)
    assert all(getattr(now, name) != getattr(record, name) for name in FACTS), "a fact is not tried here"


def test_each_field_of_a_trial_has_one_writer() -> None:
    submitted = {"trial_id", "spec", "submitted_at"}
    decided = {field.name for field in fields(TrialRecord)} - submitted - set(FACTS)
    assert decided == {
        "state",
        "reason",
        "finished_at",
        "generation",
        "members",
        "published",
        "published_members",
        "published_at",
        "join_epoch",
        "rescaled_at",
        "layout",
        "losses",
    }


def test_trials_that_are_not_over_are_held_until_released(store: TrialStore) -> None:
    first, second = store.submit(spec(0), 1.0).trial_id, store.submit(spec(1), 1.0).trial_id
    ended = store.submit(spec(2), 1.0)
    store.save_trial(replace(ended, state=TrialState.SUCCEEDED))
    store.hold([first, second, ended.trial_id, "unknown"], "why")
    store.release([second])
    assert [store.trial(name).hold for name in (first, second, ended.trial_id)] == ["why", None, None]


def test_only_its_driver_renews_and_disowns_a_study(store: TrialStore) -> None:
    store.put_study(Study(name="s", owner="me", owner_seen_at=1.0))
    assert not store.touch_study("s", "you", 2.0)
    store.disown_study("s", "you")
    assert store.touch_study("s", "me", 3.0)
    assert store.studies() == [Study(name="s", owner="me", owner_seen_at=3.0)]
    store.disown_study("s", "me")
    assert store.studies()[0].owner is None


def test_the_first_outcome_and_the_highest_number_stay(store: TrialStore) -> None:
    trial_id = store.submit(spec(), 1.0).trial_id
    assert store.set_outcome(trial_id, Outcome(kind="value", value=1.0))
    assert not store.set_outcome(trial_id, Outcome(kind="error", message="late"))
    store.note_entered(trial_id, 5)
    store.note_entered(trial_id, 4)
    record = store.trial(trial_id)
    assert record.outcome is not None
    assert (record.outcome.kind, record.entered) == ("value", 5)


def test_live_trials_leave_out_finished_ones(store: TrialStore) -> None:
    first, second = store.submit(spec(0), 1.0), store.submit(spec(1), 1.0)
    store.save_trial(replace(first, state=TrialState.PRUNED))
    assert [record.trial_id for record in store.trials(live_only=True)] == [second.trial_id]


def test_replicas_come_and_go(store: TrialStore) -> None:
    trial_id = store.submit(spec(), 1.0).trial_id
    for index in range(3):
        store.add_replica(
            ReplicaRecord(
                replica_id=f"r{index}", trial_id=trial_id, node="n", slot=index, launch_index=index, launched_at=1.0
            )
        )
    store.update_replica("r0", pid=12, process_started=3.5)
    store.update_replica("r1", state=ReplicaState.GONE, gone_at=9.0, exit_status=-9)
    store.set_replica_state(["r0", "r1"], ReplicaState.ACTIVE)
    states = {row.replica_id: row.state for row in store.replicas(live_only=False)}
    assert states == {"r0": ReplicaState.ACTIVE, "r1": ReplicaState.GONE, "r2": ReplicaState.LAUNCHED}
    assert [row.replica_id for row in store.replicas(trial_id=trial_id)] == ["r0", "r2"]
    ended = [(interval.slot, interval.ended) for interval in store.slot_intervals()]
    assert ended == [(0, None), (1, 9.0), (2, None)]


def test_what_is_gone_stays_gone_and_a_joiner_that_aims_elsewhere_is_left_alone(store: TrialStore) -> None:
    """Replicas and the control loop write the same fields; neither undoes what the other has written since."""
    trial_id = store.submit(spec(), 1.0).trial_id
    for index in range(2):
        store.add_replica(
            ReplicaRecord(
                replica_id=f"r{index}", trial_id=trial_id, node="n", slot=index, launch_index=index, launched_at=1.0
            )
        )
    store.update_replica("r0", state=ReplicaState.GONE, gone_at=9.0, exit_status=-9)
    store.update_replica("r0", state=ReplicaState.READY, join_epoch=3, ready_at=9.5)
    store.retry_join("r0", None)
    store.update_replica("r1", state=ReplicaState.READY, join_epoch=3)
    store.update_replica("r1", state=ReplicaState.READY, join_epoch=5)
    store.retry_join("r1", 3)

    def shown(replica_id: str) -> tuple[ReplicaState, int | None, bool, int | None]:
        (row,) = [each for each in store.replicas(live_only=False) if each.replica_id == replica_id]
        return row.state, row.join_epoch, row.retry_join, row.exit_status

    assert shown("r0") == (ReplicaState.GONE, None, False, -9)
    assert shown("r1") == (ReplicaState.READY, 5, False, None)
    store.retry_join("r1", 5)
    assert shown("r1") == (ReplicaState.LAUNCHED, None, True, None)
    store.retry_join("r1", None)
    assert [row.replica_id for row in store.replicas()] == ["r1"]


def test_reports_keep_the_first_value_of_a_step(store: TrialStore) -> None:
    trial_id, silent = store.submit(spec(), 1.0).trial_id, store.submit(spec(1), 1.0).trial_id
    assert not store.has_reported(trial_id)
    assert [store.add_report(Report(trial_id, 0, value, 10.0)) for value in (0.5, 0.7)] == [True, False]
    store.add_report(Report(trial_id, 1, None, 20.0))
    assert store.reports("s") == [Report(trial_id, 0, 0.5, 10.0), Report(trial_id, 1, None, 20.0)]
    assert store.reports("other") == []
    assert (store.has_reported(trial_id), store.has_reported(silent)) == (True, False)


def test_hints_history_and_studies(store: TrialStore) -> None:
    trial_id = store.submit(spec(), 1.0).trial_id
    store.put_hints(trial_id, {"a": 1})
    store.put_hints(trial_id, {"a": 2})
    assert store.hints([trial_id, "nobody"]) == {trial_id: {"a": 2}}
    entry = HistoryEntry(at=1.0, trial_id=trial_id, what="starts", reason=Reason(code="c", sentence="s"))
    store.add_history(entry)
    assert store.history(trial_id) == [entry]
    later = replace(entry, at=3.0, what="1 -> 2 replicas")
    store.add_history(later)
    other = store.submit(spec(1), 1.0).trial_id
    store.add_history(replace(later, at=2.0, trial_id=other, what="2 -> 1 replicas"))
    assert [change.what for change in store.resizes()] == ["2 -> 1 replicas", "1 -> 2 replicas"]
    store.put_study(Study(name="s", direction="maximize"))
    terms = StudyTerms(weight=2.0, yields_to=("a", "b"), quota=3, goal="deadline", deadline_at=5.0)
    store.put_study(Study(name="s", direction="maximize", terms=terms, owner="me", owner_seen_at=1.0))
    assert store.studies() == [Study(name="s", direction="maximize", terms=terms, owner="me", owner_seen_at=1.0)]
    store.set_terms("s", StudyTerms(weight=3.0))
    assert store.studies()[0].terms == StudyTerms(weight=3.0)
    assert store.studies()[0].owner_seen_at == 1.0


def test_what_people_look_at_afterwards_is_kept(store: TrialStore) -> None:
    first, second = store.submit(spec(), 1.0).trial_id, store.submit(spec(1, study="other"), 1.0).trial_id
    store.put_parameters(first, {"lr": 0.1, "name": "a"})
    store.put_parameters(first, {"depth": 3, "name": "b"})
    assert store.trial(first).parameters == {"lr": 0.1, "name": "b", "depth": 3}
    assert store.trial(second).parameters == {}
    store.add_report(Report(first, 5, 0.5, 10.0, 7.5))
    store.add_report(Report(first, 2, None, 4.0, 6.5))
    store.add_report(Report(second, 0, 0.25, 0.0))
    assert store.trial_reports(first) == [Report(first, 2, None, 4.0, 6.5), Report(first, 5, 0.5, 10.0, 7.5)]
    assert store.latest_reports("s") == {first: Report(first, 5, 0.5, 10.0, 7.5)}
    assert store.latest_reports("other") == {second: Report(second, 0, 0.25, 0.0)}
    assert store.trial_reports(store.submit(spec(2), 1.0).trial_id) == []
    seen = Measurement(trial_id=first, at=2.0, progress=64.0, replicas=2, batch=32, goodput=8.5, noise_scale=3.0)
    store.put_hints(first, {"a": 1}, seen)
    store.put_hints(first, {"a": 2})
    assert store.measurements(first) == [seen]
    assert store.measurements(second) == []
    entries = [
        HistoryEntry(at=at, trial_id=name, what="waits", reason=Reason(code="c", sentence="s"), numbers={"gain": at})
        for at, name in ((1.0, first), (2.0, second), (3.0, first))
    ]
    for entry in entries:
        store.add_history(entry)
    assert store.recent_history(limit=2) == [entries[2], entries[1]]
    assert store.recent_history(limit=9, until=2.0) == [entries[1], entries[0]]
    assert store.recent_history(limit=9, study="s") == [entries[2], entries[0]]
    study = Study(name="s", user="ada")
    store.put_study(study)
    assert store.studies() == [study]


def test_an_unknown_trial_is_named(store: TrialStore) -> None:
    with pytest.raises(UnknownTrial, match="no trial is called 'nope'"):
        store.trial("nope")


def test_words_that_no_database_likes_are_kept_readable(store: TrialStore) -> None:
    record = store.submit(spec(), 1.0)
    words = "nothing\0here, 'quotes', \N{SNOWMAN}, and " + "x" * 10_000
    reason = Reason(code="c", sentence=words)
    store.save_trial(replace(record, reason=reason))
    store.add_history(HistoryEntry(at=1.0, trial_id=record.trial_id, what="waits", reason=reason, who="policy x"))
    store.request_cancel(record.trial_id, words)
    store.set_outcome(record.trial_id, Outcome(kind="error", message=words))
    now = store.trial(record.trial_id)
    for kept in (now.reason.sentence, now.cancel_requested or "", store.history(record.trial_id)[0].reason.sentence):
        assert kept.replace("\N{REPLACEMENT CHARACTER}", "\0") == words
    assert now.outcome is not None and now.outcome.message == words


def test_a_store_opened_again_has_everything(url: str) -> None:
    first = sql_store(url)
    record = first.submit(spec(), 1.0)
    first.close()
    second = sql_store(url)
    assert second.trials() == [record]
    second.close()


def test_of_hints_in_quick_succession_the_last_is_written_when_a_trial_ends_or_its_store_closes(url: str) -> None:
    first = sql_store(url)
    ended, live = (first.submit(spec(number), 1.0).trial_id for number in (0, 1))
    for trial_id in (ended, live):
        for number in range(3):
            first.put_hints(trial_id, {"number": number})
            assert first.hints([trial_id]) == {trial_id: {"number": number}}
    reader = SqlBacking(url)
    assert reader.hints([ended, live]) == {ended: {"number": 0}, live: {"number": 0}}
    first.save_trial(replace(first.trial(ended), state=TrialState.CANCELLED))
    assert reader.hints([ended, live]) == {ended: {"number": 2}, live: {"number": 0}}
    first.close()
    assert reader.hints([ended, live]) == {ended: {"number": 2}, live: {"number": 2}}
    reader.close()


def test_writers_in_several_threads_lose_nothing(url: str) -> None:
    made = sql_store(url)

    def submit(study: str) -> None:
        for number in range(15):
            made.submit(spec(number, study), 1.0)

    threads = [threading.Thread(target=submit, args=(name,)) for name in "abcd"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made.trials()) == 60
    made.close()


def test_a_folder_that_cannot_be_written_is_named() -> None:
    with pytest.raises(StoreUnavailable, match="cannot be opened"):
        sql_store("sqlite:////nonexistent-folder/trials.db")


@pytest.mark.parametrize("url", ["mysql+nothing://somewhere/x", "not a url", "postgresql+psycopg://me:secret@/x?bad=1"])
def test_a_database_that_cannot_be_used_is_named_without_its_password(url: str) -> None:
    with pytest.raises(StoreUnavailable, match="cannot be") as refused:
        sql_store(url)
    assert "secret" not in str(refused.value)


@pytest.mark.slow
def test_a_servers_database_belongs_to_one_scheduler_at_a_time(postgres: str) -> None:
    url = emptied(postgres)
    first = sql_store(url, exclusive=True)
    with pytest.raises(StateFolderInUse, match=rf"belongs to a running scheduler \(elastune pid {os.getpid()} on"):
        sql_store(url, exclusive=True)
    first.submit(spec(), 1.0)
    admin = sa.create_engine(url, isolation_level="AUTOCOMMIT")
    with admin.connect() as connection:
        others = "SELECT pg_terminate_backend(pid, 10000) FROM pg_stat_activity WHERE pid <> pg_backend_pid()"
        connection.exec_driver_sql(f"{others} AND application_name LIKE 'elastune%%'")
        thief = sql_store(url, exclusive=True)
        with pytest.raises(StoreUnavailable, match=r"meanwhile the database .* belongs to a running scheduler"):
            first.submit(spec(1), 1.0)
        thief.close()
    admin.dispose()
    assert first.submit(spec(), 2.0).submitted_at == 1.0
    first.close()
    second = sql_store(url, exclusive=True)
    assert len(second.trials()) == 1
    second.close()
