"""Reports on their way: they arrive once, in order, with the next question or by themselves, whoever is lost."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import pytest

from dist_core.errors import ControlChannelError
from tuner_bridge.optuna import reports
from tuner_bridge.optuna.reports import PendingReports, Report


def report(step: int) -> Report:
    return Report(step=step, value=step / 2, progress=float(step))


class Study:
    """Where reports arrive by themselves."""

    def __init__(self) -> None:
        self.told: list[int] = []
        self.came = threading.Event()
        self.tells = True
        self.error: Exception | None = None
        self.looked_up = 0

    def take(self, reports: Sequence[Report]) -> None:
        if self.error is not None:
            self.came.set()
            raise self.error
        self.told += [each["step"] for each in reports]
        self.came.set()

    def pending(self) -> PendingReports:
        return PendingReports(self.take, lambda: self.tells, self.look_up)

    def look_up(self) -> None:
        self.looked_up += 1
        if self.looked_up > 100:
            raise AssertionError("waited in vain")


def steps(found: Sequence[Report]) -> list[int]:
    return [each["step"] for each in found]


def untold(pending: PendingReports) -> list[int]:
    return steps(pending.state_dict()["untold"])


def test_a_report_travels_with_the_question_that_follows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reports, "ALONE_AFTER_SECONDS", 60.0)
    study = Study()
    pending = study.pending()
    pending.add(report(1))
    pending.add(report(2))
    assert steps(pending.take()) == [1, 2]
    assert untold(pending) == [1, 2], "until the answer is there they are part of the trial's state"
    pending.arrived()
    assert untold(pending) == []
    assert pending.take() == []
    assert study.told == []


def test_a_report_that_no_question_follows_arrives_by_itself() -> None:
    study = Study()
    pending = study.pending()
    pending.add(report(7))
    assert study.came.wait(30.0)
    assert pending.take() == []
    assert study.told == [7]


def test_a_question_that_was_given_up_leaves_its_reports_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reports, "ALONE_AFTER_SECONDS", 60.0)
    pending = Study().pending()
    pending.add(report(1))
    pending.take()
    pending.add(report(2))
    pending.give_back()
    assert steps(pending.take()) == [1, 2]


def test_what_the_study_raises_is_raised_at_the_next_call() -> None:
    study = Study()
    study.error = ValueError("the storage is gone")
    pending = study.pending()
    pending.add(report(1))
    assert study.came.wait(30.0)
    with pytest.raises(ValueError, match="the storage is gone"):
        pending.take()
    study.error = None
    assert pending.take() == []


def test_a_replica_that_takes_over_tells_what_its_predecessor_may_not_have_told() -> None:
    study = Study()
    study.tells = False
    pending = study.pending()
    for step in range(3):
        pending.add(report(step))
    assert untold(pending) == [0, 1, 2]
    study.tells = True
    pending.add(report(3))
    assert study.came.wait(30.0)
    assert pending.take() == []
    assert study.told == [0, 1, 2, 3]


def test_what_another_replica_has_told_is_forgotten() -> None:
    study = Study()
    study.tells = False
    pending = study.pending()
    pending.add(report(1))
    pending.forget()
    assert pending.are_settled


def test_a_resumed_trial_tells_what_its_checkpoint_counts() -> None:
    study = Study()
    study.tells = False
    before = study.pending()
    before.add(report(4))
    study.tells = True
    after = study.pending()
    after.load_state_dict(before.state_dict())
    assert study.came.wait(30.0)
    assert after.take() == []
    assert study.told == [4]


def test_a_replica_that_takes_over_with_all_it_can_remember_goes_on() -> None:
    study = Study()
    study.tells = False
    pending = study.pending()
    for step in range(reports.MOST_KEPT + 10):
        pending.add(report(step))
    study.tells = True
    pending.add(report(5000))
    assert study.came.wait(30.0)
    last = steps(pending.take())
    assert len(study.told) + len(last) == reports.MOST_KEPT + 1
    assert [*study.told, *last][-1] == 5000


def test_who_waits_for_reports_looks_up_whether_it_should_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    class Leaves(Exception):
        pass

    def leave() -> None:
        raise Leaves

    monkeypatch.setattr(reports, "LOOK_SECONDS", 0.01)
    never, begun = threading.Event(), threading.Event()

    def send(_: Sequence[Report]) -> None:
        begun.set()
        never.wait(30.0)

    pending = PendingReports(send, lambda: True, leave)
    pending.add(report(1))
    assert begun.wait(30.0)
    with pytest.raises(Leaves):
        pending.take()
    assert untold(pending) == [1], "what a checkpoint of now would hold"
    never.set()


def test_reports_that_nobody_heard_stay_part_of_the_trial() -> None:
    study = Study()
    study.error = ControlChannelError("nobody answers")
    pending = study.pending()
    pending.add(report(1))
    assert study.came.wait(30.0)
    with pytest.raises(ControlChannelError):
        pending.take()
    assert untold(pending) == [1]
