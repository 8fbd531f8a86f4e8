"""What a store says is what its backing holds, also after writes that failed, made or not."""

from __future__ import annotations

import os
import signal
import sqlite3
import threading
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from hypothesis import given, settings
from hypothesis import strategies as st

from trials.errors import StoreUnavailable
from trials.record import Outcome, Reason, ReplicaRecord, ReplicaState, Report, Study
from trials.spec import TrialSpec
from trials.states import TrialState
from trials.store import SqlBacking, TrialStore, sql_store
from trials.store.base import HistoryEntry
from trials.store.tables import make_tables


def each(rows: Iterable[Any], write: Callable[[Any], object]) -> None:
    for row in rows:
        write(row)


WRITES: dict[str, Callable[[TrialStore, int], Any]] = {
    "put_study": lambda store, n: store.put_study(Study(name="s", owner=f"o{n}", owner_seen_at=1.0)),
    "touch_study": lambda store, n: store.touch_study("s", f"o{n}", float(n)),
    "disown_study": lambda store, n: store.disown_study("s", f"o{n}"),
    "submit": lambda store, n: store.submit(TrialSpec(study="s", number=n, entrypoint="m:f"), 1.0),
    "save_trial": lambda store, n: each(store.trials()[:1], lambda row: store.save_trial(replace(row, generation=n))),
    "end": lambda store, n: each(
        store.trials()[n:][:1], lambda row: store.save_trial(replace(row, state=TrialState.PRUNED))
    ),
    "set_outcome": lambda store, n: each(
        store.trials()[n:][:1], lambda row: store.set_outcome(row.trial_id, Outcome(kind="value", value=n))
    ),
    "note_entered": lambda store, n: each(store.trials()[:1], lambda row: store.note_entered(row.trial_id, n)),
    "request_cancel": lambda store, n: each(
        store.trials()[n:], lambda row: store.request_cancel(row.trial_id, f"why {n}")
    ),
    "hold": lambda store, n: store.hold([row.trial_id for row in store.trials()[n:]], f"hold {n}"),
    "release": lambda store, n: store.release([row.trial_id for row in store.trials()[n:]]),
    "add_replica": lambda store, n: each(
        store.trials()[:1],
        lambda row: store.add_replica(
            ReplicaRecord(
                replica_id=f"r{len(store.replicas(live_only=False))}",
                trial_id=row.trial_id,
                node="n",
                slot=n,
                launch_index=0,
            )
        ),
    ),
    "update_replica": lambda store, n: store.update_replica(f"r{n}", pid=n),
    "gone": lambda store, n: store.update_replica(f"r{n}", state=ReplicaState.GONE, gone_at=1.0),
    "set_replica_state": lambda store, n: store.set_replica_state([f"r{n}"], ReplicaState.ACTIVE),
    "put_hints": lambda store, n: each(store.trials()[n:], lambda row: store.put_hints(row.trial_id, {"n": n})),
    "add_report": lambda store, n: each(
        store.trials()[:2], lambda row: store.add_report(Report(row.trial_id, n, float(n), 1.0))
    ),
}
WRITES |= {
    "add_history": lambda store, n: each(store.trials()[n:], lambda row: store.add_history(change(row.trial_id, n))),
    "note a warning": lambda store, n: each(
        store.trials()[:1], lambda row: store.add_history(replace(change(row.trial_id, n), what="warning"))
    ),
    "forget_trials": lambda store, n: store.forget_trials([row.trial_id for row in store.trials()[n:][:1]]),
}


def change(trial_id: str, number: int) -> HistoryEntry:
    reason = Reason(code="c", sentence="s")
    return HistoryEntry(at=float(number), trial_id=trial_id, what=f"{number} -> 9 replicas", reason=reason)


SAVES = [
    "save_study",
    "add_trial",
    "save_trials",
    "add_replica",
    "save_replicas",
    "save_hints",
    "append",
    "forget_trials",
]
FAILS = st.sampled_from(["no", "no", "no", "before", "after"])


def fails(method: Callable[..., Any], when: str) -> Callable[..., Any]:
    def call(*args: Any, **fields: Any) -> Any:
        if when == "after":
            method(*args, **fields)
        raise StoreUnavailable("on purpose")

    return call


def everything(store: TrialStore | SqlBacking) -> dict[str, Any]:
    trials = store.trials()
    return {
        "studies": store.studies(),
        "trials": trials,
        "replicas": store.replicas(),
        "of each": [store.replicas(trial_id=row.trial_id) for row in trials],
        "hints": store.hints([row.trial_id for row in trials]),
        "reports": store.reports("s"),
        "resizes": store.resizes(),
        "history": [store.history(row.trial_id) for row in trials],
    }


@given(st.lists(st.tuples(st.sampled_from(sorted(WRITES)), st.integers(0, 3), FAILS), max_size=25))
@settings(max_examples=60, deadline=None)
def test_memory_and_backing_never_differ(writes: list[tuple[str, int, str]]) -> None:
    sql = SqlBacking("sqlite://")
    sql.save_study(Study(name="s", owner="o0"))
    store = TrialStore(sql)
    for name, number, when in writes:
        with pytest.MonkeyPatch.context() as patch:
            if when != "no":
                for method in SAVES:
                    patch.setattr(sql, method, fails(getattr(sql, method), when))
            try:
                WRITES[name](store, number)
            except StoreUnavailable:
                assert when != "no"
        assert everything(store) == everything(sql)
    store.close()


def test_an_outcome_whose_write_seemed_to_fail_is_seen() -> None:
    sql = SqlBacking("sqlite://")
    store = TrialStore(sql)
    trial_id = store.submit(TrialSpec(study="s", number=0, entrypoint="m:f"), 1.0).trial_id
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sql, "save_trials", fails(sql.save_trials, "after"))
        with pytest.raises(StoreUnavailable):
            store.set_outcome(trial_id, Outcome(kind="value", value=0.5))
    assert not store.set_outcome(trial_id, Outcome(kind="value", value=0.7))
    outcome = store.trial(trial_id).outcome
    assert outcome is not None and outcome.value == 0.5
    store.close()


def test_readers_do_not_wait_for_a_write() -> None:
    sql = SqlBacking("sqlite://")
    store = TrialStore(sql)
    trial_id = store.submit(TrialSpec(study="s", number=0, entrypoint="m:f"), 1.0).trial_id
    begun, may_end = threading.Event(), threading.Event()
    save = sql.save_trials

    def slowly(records: Any) -> Any:
        begun.set()
        assert may_end.wait(10.0)
        return save(records)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sql, "save_trials", slowly)
        writer = threading.Thread(target=store.note_entered, args=(trial_id, 1))
        writer.start()
        assert begun.wait(10.0)
        assert store.trial(trial_id).entered == 0, "not seen before it is kept"
        may_end.set()
        writer.join()
    assert store.trial(trial_id).entered == 1
    store.close()


def test_tables_are_made_by_a_process_that_lives_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "trials.db"
    child = os.fork()
    if child == 0:
        engine = sa.create_engine(f"sqlite:///{path}")

        @sa.event.listens_for(engine, "before_cursor_execute")
        def die(_conn: object, _cursor: object, statement: str, *_: object) -> None:
            if "CREATE TABLE replicas" in statement:
                os.kill(os.getpid(), signal.SIGKILL)

        try:
            make_tables(engine)
        finally:
            os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    store = sql_store(f"sqlite:///{path}")
    store.submit(TrialSpec(study="s", number=0, entrypoint="m:f"), 1.0)
    store.close()


@pytest.mark.parametrize("change", ["UPDATE about SET version = 99", "DROP TABLE about"])
def test_tables_of_another_version_are_refused(tmp_path: Path, change: str) -> None:
    path = tmp_path / "trials.db"
    sql_store(f"sqlite:///{path}").close()
    with sqlite3.connect(path) as connection:
        connection.execute(change)
    connection.close()
    with pytest.raises(StoreUnavailable, match=r"tables of version (99|unknown).*reads 1"):
        sql_store(f"sqlite:///{path}")


def test_a_file_that_is_no_database_is_refused(tmp_path: Path) -> None:
    (tmp_path / "trials.db").write_bytes(b"not a database, but long enough to look at\n" * 100)
    with pytest.raises(StoreUnavailable, match="cannot be opened"):
        sql_store(f"sqlite:///{tmp_path / 'trials.db'}")
