"""What a live display is told: those that train or wait in full, those that are over by their number."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from scheduler.api import display_routes
from scheduler.dashboard.terminal import LiveView
from tests.support.site import Site
from trials.record import Reason, Report, Study
from trials.states import TrialState
from trials.store.base import HistoryEntry


@pytest.fixture
def site(tmp_path: Path) -> Site:
    """Two studies: of the first two trials are over and one waits, of the second one waits."""
    site = Site(tmp_path)
    site.store.put_study(Study(name="s"))
    for number, state in enumerate((TrialState.SUCCEEDED, TrialState.PRUNED, None)):
        over = site.submit(number)["trial_id"]
        site.store.add_report(Report(over, 3, 0.5, 96.0, 1.0))
        if state is not None:
            record = site.store.trial(over)
            site.store.save_trial(replace(record, state=state, finished_at=1.0))
    site.submit(7, study="other")
    return site


def test_those_that_are_over_are_counted(site: Site) -> None:
    told = site.call("GET", "/overview").json()
    assert sorted((each["study"], each["number"]) for each in told["trials"]) == [("other", 7), ("s", 2)]
    assert told["over"] == {"s": {"succeeded": 1, "pruned": 1}}
    waits = next(each for each in told["trials"] if each["number"] == 2)
    assert waits["latest"] == {"step": 3, "value": 0.5}
    told = site.call("GET", "/overview", params={"study": "other"}).json()
    assert [each["number"] for each in told["trials"]] == [7] and told["over"] == {}


def test_changes_are_told_once_and_by_name(
    site: Site, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(display_routes, "MOST_CHANGES", 2)
    ids = {(record.spec.study, record.spec.number): record.trial_id for record in site.store.trials()}
    view = LiveView()

    def change(what: str, number: int, sentence: str) -> None:
        reason = Reason(code="c", sentence=sentence)
        site.store.add_history(HistoryEntry(at=2.0, trial_id=ids["s", number], what=what, reason=reason))

    def shown() -> list[str]:
        view.show(site.call("GET", "/overview", params={"study": "s"}).json())
        return capsys.readouterr().out.splitlines()

    change("1 -> 2 replicas", 2, f"took from {ids['other', 7]} and {ids['s', 0]}")
    told = site.call("GET", "/overview", params={"study": "s"}).json()
    assert sorted((each["study"], each["number"]) for each in told["named"]) == [("other", 7), ("s", 0), ("s", 2)]
    assert shown() == ["trial s/2: 1 -> 2 replicas: took from trial other/7 and trial s/0"]
    assert shown() == []
    for size in (3, 4):
        change(f"{size - 1} -> {size} replicas", 1, "there was room")
    assert shown() == ["trial 1: 2 -> 3 replicas: there was room", "trial 1: 3 -> 4 replicas: there was room"]
    assert site.call("GET", "/overview").json()["num_changes"] == 3
    assert shown() == []


def test_rows_of_trials_that_are_over_are_told_anew_when_anything_of_them_changes(site: Site) -> None:
    def row() -> dict[str, Any]:
        told = site.call("GET", "/rows", params={"study": "s"}).json()
        assert told["over"] == 2 and len(told["trials"]) == 3
        found: dict[str, Any] = next(each for each in told["trials"] if each["number"] == 0)
        return found

    before = row()
    assert row() == before and (before["step"], before["title"], before["state"]) == (3, "s", "succeeded")
    trial_id = before["id"]
    store = site.service.store
    store.save_trial(replace(store.trial(trial_id), reason=Reason(code="c", sentence="another one")))
    store.add_report(Report(trial_id, 4, 0.75, 128.0, 2.0))
    store.put_study(Study(name="s", title="called so"))
    changed = {"code": "c", "why": "another one", "step": 4, "latest": 0.75, "progress": 128.0, "title": "called so"}
    assert row() == {**before, **changed}
