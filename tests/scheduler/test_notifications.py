"""What a webhook is told, and what is no news."""

from __future__ import annotations

import queue
import time
from collections.abc import Mapping
from typing import Any

import httpx2
import pytest

from scheduler.host import notifications
from scheduler.host.notifications import Notifier, Seen, news
from trials.record import Outcome, Reason, Study, TrialRecord
from trials.spec import TrialSpec
from trials.states import TrialState
from trials.store import TrialStore
from trials.terms import StudyTerms


def trial(number: int, state: TrialState, value: float | None = None, study: str = "s") -> TrialRecord:
    return TrialRecord(
        trial_id=f"t{number}",
        spec=TrialSpec(study=study, number=number, entrypoint="m:f"),
        state=state,
        reason=Reason(code="c", sentence="it broke"),
        outcome=None if value is None else Outcome(kind="value", value=value),
    )


def test_a_failure_an_end_and_a_budget_are_told_once() -> None:
    terms = StudyTerms(budget_slot_hours=10.0)
    running = Study(name="s", title="mine", direction="maximize", owner="me", terms=terms)
    notices, seen = news(Seen(), [trial(0, TrialState.RUNNING)], [running], {"s": 7.9})
    assert notices == []
    trials = [trial(0, TrialState.SUCCEEDED, 0.5), trial(1, TrialState.FAILED)]
    notices, seen = news(seen, trials, [running], {"s": 8.0})
    assert [(notice.event, notice.text) for notice in notices] == [
        ("trial_failed", "trial mine/1 failed: it broke"),
        ("budget", "study mine has used 8 of its 10 slot hours"),
    ]
    left = Study(name="s", title="mine", direction="maximize", terms=terms)
    notices, seen = news(seen, trials, [left], {"s": 8.5})
    assert [(notice.event, notice.text) for notice in notices] == [
        ("study_done", "study mine is done: 2 trials, the best 0.5")
    ]
    assert notices[0].to_json()["trials"] == 2
    notices, seen = news(seen, trials, [left], {"s": 9.5})
    assert notices == []
    # It goes on, and is done once more; another budget is another matter.
    notices, seen = news(
        seen, trials, [Study(name="s", owner="me", terms=StudyTerms(budget_slot_hours=11.0))], {"s": 9.5}
    )
    assert [notice.event for notice in notices] == ["budget"]
    notices, _ = news(seen, [*trials, trial(2, TrialState.PRUNED)], [left], {"s": 0.0})
    assert [notice.event for notice in notices] == ["study_done"]


def test_what_was_so_beforehand_is_no_news_and_an_address_that_is_away_is_tried_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(notifications, "FIRST_PAUSE_SECONDS", 0.01)
    store = TrialStore()
    store.adopt(trial(0, TrialState.FAILED))
    sent: queue.Queue[Mapping[str, Any]] = queue.Queue()
    tries = [0]

    def post(url: str, document: Mapping[str, Any]) -> None:
        assert url == "http://hook"
        tries[0] += 1
        if tries[0] == 1:
            raise httpx2.ConnectError("away")
        sent.put(document)

    now = [0.0]
    notifier = Notifier("http://hook", store, clock=lambda: now[0], post=post)
    notifier.look()
    store.adopt(trial(1, TrialState.FAILED))
    notifier.look()
    time.sleep(0.05)
    assert sent.empty(), "looks are not made more often than needed"
    now[0] += 10.0
    notifier.look()
    document = sent.get(timeout=5.0)
    assert (document["event"], document["trial"]) == ("trial_failed", "t1")
    assert tries[0] == 2
    assert sent.empty()
