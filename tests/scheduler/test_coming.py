"""Which trials are about to come, from what drivers say and from how long they took before."""

from __future__ import annotations

from typing import Any

import pytest

from scheduler.knowledge.coming import FIRST_GAP_SECONDS, ComingTrials, Plans
from trials.record import Reason, TrialRecord
from trials.spec import TrialSpec


def trial(number: int, at: float, study: str = "s") -> TrialRecord:
    spec = TrialSpec(study=study, number=number, entrypoint="a.module:main", min_replicas=1, max_replicas=4)
    return TrialRecord(trial_id=f"{study}-{number}", spec=spec, submitted_at=at, reason=Reason(code="", sentence=""))


class Follows:
    """A study whose trials come and end."""

    def __init__(self, **plans: Any) -> None:
        self.coming = ComingTrials()
        self.live: list[TrialRecord] = []
        self.plans = {"s": Plans(**plans)} if plans else {}

    def at(self, now: float) -> int:
        self.coming.look(self.live, self.plans, now)
        return self.coming.of("s", now)[0]


def test_what_ends_is_replaced_as_long_as_trials_are_left() -> None:
    study = Follows(at_a_time=3, left=2)
    study.live = [trial(number, 0.0) for number in range(3)]
    assert study.at(0.0) == 0
    del study.live[0]
    assert study.at(10.0) == 1
    study.live.append(trial(3, 10.1))
    assert study.at(10.1) == 0
    del study.live[:2]
    assert study.at(20.0) == 1, "one is left to be sent"
    study.live.append(trial(4, 20.1))
    study.live = study.live[-1:]
    assert study.at(30.0) == 0


def test_a_driver_that_begins_sends_several() -> None:
    study = Follows(at_a_time=4, left=None)
    study.live = [trial(0, 0.0)]
    assert study.at(0.0) == 3
    assert study.at(FIRST_GAP_SECONDS + 0.1) == 0, "it has something else to do"


def test_how_long_the_next_is_waited_for_is_learned() -> None:
    """A sampler that thinks for five seconds keeps its slot; one that takes milliseconds loses it soon."""
    for gap, kept, lost in ((5.0, 14.0, 16.0), (0.01, 0.19, 0.21)):
        study = Follows(at_a_time=1, left=None)
        now = 0.0
        for number in range(5):
            study.live = [trial(number, now)]
            assert study.at(now) == 0
            study.live = []
            now += 100.0
            assert study.at(now) == 1
            now += gap
        now -= gap
        assert study.at(now + kept) == 1
        assert study.at(now + lost) == 0


def test_without_plans_each_end_is_followed_by_another_for_a_moment() -> None:
    study = Follows()
    study.live = [trial(0, 0.0), trial(1, 0.0)]
    assert study.at(0.0) == 0
    study.live = study.live[1:]
    assert study.at(1.0) == 1
    assert study.at(1.0 + FIRST_GAP_SECONDS + 0.1) == 0
    assert study.at(50.0) == 0, "it is not thought of again"


def test_another_studys_end_is_nobody_elses_business() -> None:
    coming = ComingTrials()
    mine, other = trial(0, 0.0), trial(0, 0.0, study="t")
    coming.look([mine, other], {}, 0.0)
    coming.look([mine], {}, 1.0)
    assert (coming.of("s", 1.0)[0], coming.of("t", 1.0)[0]) == (0, 1)
    assert coming.of("unheard of", 1.0) == (0, None)


@pytest.mark.parametrize("left", [0, None])
def test_the_latest_trial_is_what_the_next_is_like(left: int | None) -> None:
    study = Follows(at_a_time=1, left=left)
    study.live = [trial(0, 0.0)]
    study.at(0.0)
    study.live = []
    study.coming.look([], study.plans, 5.0)
    number, latest = study.coming.of("s", 5.0)
    assert number == (0 if left == 0 else 1)
    assert latest is not None and latest.trial_id == "s-0"
