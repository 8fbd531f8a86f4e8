"""Who has been silent, on a clock of the test's own."""

from __future__ import annotations

from scheduler.loop.hearing import Hearing
from trials.record import ReplicaRecord


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def replica(name: str, *, has_called: bool = True) -> ReplicaRecord:
    contact = 1.0 if has_called else None
    return ReplicaRecord(replica_id=name, trial_id="t", node="n", slot=0, launch_index=0, contact_at=contact)


def test_who_has_called_and_stopped_is_named_once() -> None:
    clock = Clock()
    hearing = Hearing(clock, silence_seconds=45.0)
    alive = [replica("a"), replica("b"), replica("starting", has_called=False)]
    for clock.now in range(0, 80, 4):
        assert hearing.look()
        hearing.note("a")
        silent = [each.replica_id for each in hearing.silent(alive)]
        assert silent == (["b"] if clock.now == 48 else []), clock.now
        if silent:
            alive = alive[:1] + alive[2:]


def test_time_in_which_nobody_could_be_heard_does_not_count() -> None:
    clock = Clock()
    hearing = Hearing(clock, silence_seconds=45.0)
    alive = [replica("a")]
    assert hearing.silent(alive) == []
    clock.now = 300.0
    assert not hearing.look()
    assert hearing.silent(alive) == []
    clock.now = 303.0
    assert hearing.look()
    clock.now = 340.0
    hearing.was_deaf()
    clock.now = 384.0
    assert hearing.silent(alive) == []
    clock.now = 386.0
    assert hearing.silent(alive) == alive
