"""Who has been silent and what becomes of it, on a clock of the test's own."""

from __future__ import annotations

from scheduler.loop.journal import Journal
from scheduler.loop.liveness import Liveness
from scheduler.policy import policy_by_name
from tests.support.kubernetes_store import spec
from trials.launch.memory import InMemoryLauncher
from trials.record import ReplicaRecord
from trials.store import TrialStore


class Bench:
    def __init__(self) -> None:
        self.now = 0.0
        self.store = TrialStore()
        self.trial_id = self.store.submit(spec(), 0.0).trial_id
        self.launcher = InMemoryLauncher({"n": 4})
        journal = Journal(self.store, policy_by_name("goodput"))
        self.liveness = Liveness(self.launcher, journal, lambda: self.now, silence_seconds=45.0)

    def replica(self, name: str, *, has_called: bool = True) -> ReplicaRecord:
        contact = 1.0 if has_called else None
        return ReplicaRecord(
            replica_id=name, trial_id=self.trial_id, node="n", slot=0, launch_index=0, contact_at=contact
        )

    def ended(self, replicas: list[ReplicaRecord]) -> list[str]:
        self.launcher.stopped.clear()
        self.liveness.end_silent(replicas, self.now)
        return [name for name, _ in self.launcher.stopped]

    def told(self) -> list[str]:
        return [entry.reason.sentence for entry in self.store.history(self.trial_id) if entry.reason.code == "silent"]


def test_who_has_called_and_stopped_is_ended_once() -> None:
    bench = Bench()
    alive = [bench.replica("a"), bench.replica("b"), bench.replica("starting", has_called=False)]
    for bench.now in range(0, 80, 4):
        assert bench.liveness.look()
        bench.liveness.note("a")
        ended = bench.ended(alive)
        assert ended == (["b"] if bench.now == 48 else []), bench.now
        if ended:
            alive = alive[:1] + alive[2:]


def test_time_in_which_nobody_could_be_heard_does_not_count() -> None:
    bench = Bench()
    alive = [bench.replica("a"), bench.replica("b")]
    assert bench.ended(alive) == []
    bench.now = 300.0
    assert not bench.liveness.look()
    assert bench.ended(alive) == []
    bench.now = 303.0
    assert bench.liveness.look()
    bench.now = 340.0
    bench.liveness.was_deaf()
    bench.now = 384.0
    assert bench.ended(alive) == []
    bench.now = 386.0
    assert bench.ended(alive) == ["a", "b"]


def test_who_computes_is_not_stuck_and_is_told_of_once() -> None:
    bench = Bench()
    alive = [bench.replica("a"), bench.replica("b")]
    for bench.now in range(0, 200, 2):
        bench.liveness.note("a")
        bench.launcher.cpu["b"] = min(float(bench.now), 110.0)
        if bench.ended(alive):
            break
    assert bench.now == 142, "it has stopped computing at 110 s, which its third judgement finds"
    told = bench.told()
    assert len(told) == 2
    assert "because its process is computing" in told[0]
    assert told[1] == "replica b did not call for 45 s and was ended"


def test_its_end_says_who_ended_it() -> None:
    bench = Bench()
    alive = [bench.replica("a"), bench.replica("b")]
    bench.launcher.running["b"] = None  # type: ignore[assignment]  # only its name is looked at
    for bench.now in range(0, 50, 2):
        bench.liveness.note("a")
        bench.ended(alive)
    [gone] = bench.launcher.exits(alive[1:])
    explained = bench.liveness.explain(gone)
    assert (explained.status, explained.why) == (
        -9,
        "the scheduler ended it, because it had not called for 45 s",
    )
    assert bench.liveness.explain(gone) is gone, "another process of that name is another one"
