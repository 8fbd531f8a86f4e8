"""What the cached store says is what the database holds, also after writes that failed, made or not."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trials.errors import StoreUnavailable
from trials.record import Outcome, Reason, ReplicaRecord, ReplicaState, Report, Study
from trials.spec import TrialSpec
from trials.states import TrialState
from trials.store import CachedTrialStore, SqlTrialStore
from trials.store.base import HistoryEntry


def each(rows: Iterable[Any], write: Callable[[Any], object]) -> None:
    for row in rows:
        write(row)


WRITES: dict[str, Callable[[CachedTrialStore, int], Any]] = {
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


METHODS = {"note a warning": "add_history", "end": "save_trial", "gone": "update_replica"}
FAILS = st.sampled_from(["no", "no", "no", "before", "after"])


def fails(method: Callable[..., Any], when: str) -> Callable[..., Any]:
    def call(*args: Any, **fields: Any) -> Any:
        if when == "after":
            method(*args, **fields)
        raise StoreUnavailable("on purpose")

    return call


def everything(store: CachedTrialStore | SqlTrialStore) -> dict[str, Any]:
    trials = store.trials()
    return {
        "studies": store.studies(),
        "trials": trials,
        "live": store.trials(live_only=True),
        "each": [store.trial(row.trial_id) for row in trials],
        "replicas": store.replicas(),
        "of each": [store.replicas(trial_id=row.trial_id) for row in trials],
        "hints": store.hints([row.trial_id for row in trials]),
        "reports": store.reports("s"),
        "reported": [store.has_reported(row.trial_id) for row in trials],
        "resizes": store.resizes(),
        "history": [store.history(row.trial_id) for row in trials],
    }


@given(st.lists(st.tuples(st.sampled_from(sorted(WRITES)), st.integers(0, 3), FAILS), max_size=25))
@settings(max_examples=60, deadline=None)
def test_memory_and_database_never_differ(writes: list[tuple[str, int, str]]) -> None:
    sql = SqlTrialStore("sqlite://")
    sql.put_study(Study(name="s", owner="o0"))
    store = CachedTrialStore(sql)
    for name, number, when in writes:
        method = METHODS.get(name, name)
        with pytest.MonkeyPatch.context() as patch:
            if when != "no":
                patch.setattr(sql, method, fails(getattr(sql, method), when))
            try:
                WRITES[name](store, number)
            except StoreUnavailable:
                assert when != "no"
        assert everything(store) == everything(sql)
    store.close()


def test_an_outcome_whose_write_seemed_to_fail_is_seen() -> None:
    sql = SqlTrialStore("sqlite://")
    store = CachedTrialStore(sql)
    trial_id = store.submit(TrialSpec(study="s", number=0, entrypoint="m:f"), 1.0).trial_id
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sql, "set_outcome", fails(sql.set_outcome, "after"))
        with pytest.raises(StoreUnavailable):
            store.set_outcome(trial_id, Outcome(kind="value", value=0.5))
    assert not store.set_outcome(trial_id, Outcome(kind="value", value=0.7))
    outcome = store.trial(trial_id).outcome
    assert outcome is not None and outcome.value == 0.5
    store.close()
