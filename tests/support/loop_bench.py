"""A control loop with a store, a launcher and a clock that a test holds in its hands."""

from __future__ import annotations

from pathlib import Path

from scheduler.loop.control_loop import ControlLoop
from scheduler.loop.settings import LoopSettings
from scheduler.policy import GoodputPolicy
from trials.launch import InMemoryLauncher
from trials.record import ReplicaState, TrialRecord
from trials.spec import TrialSpec
from trials.store import sql_store


class Bench:
    """A loop with its surroundings, and hands for what replicas and drivers would do."""

    def __init__(self, folder: Path, slots: int = 4) -> None:
        self.now = 1000.0
        self.jumped = 0.0
        """How far the wall clock was set forward in all."""
        self.folder = folder
        self.store = sql_store(f"sqlite:///{folder / 'trials.db'}")
        self.launcher = InMemoryLauncher({"n0": slots})
        self.policy = GoodputPolicy()
        self.shares_files = self.one_machine = False
        self.loop = self.new_loop()

    def new_loop(self) -> ControlLoop:
        settings = LoopSettings(
            state_dir=self.folder,
            api_url=lambda: "http://127.0.0.1:1",
            replica_token=lambda replica_id: f"token-{replica_id}",
            base_environ={"PATH": "/bin"},
            shares_files=self.shares_files,
            one_machine=self.one_machine,
        )
        return ControlLoop(
            self.store,
            self.launcher,
            self.policy,
            settings,
            clock=lambda: self.now,
            monotonic=lambda: self.now - self.jumped,
        )

    def tick(self, times: int = 1, seconds: float = 0.5) -> None:
        for _ in range(times):
            self.loop.tick()
            self.now += seconds

    def submit(self, number: int = 0, study: str = "s", **bounds: int | bool | str | tuple[int, ...]) -> str:
        spec = TrialSpec(study=study, number=number, entrypoint="m:f", **{"max_replicas": 4, **bounds})  # type: ignore[arg-type]
        return self.store.submit(spec, self.now).trial_id

    def trial(self, trial_id: str) -> TrialRecord:
        return self.store.trial(trial_id)

    def all_ready(self, join_epoch: int | None = None) -> None:
        for replica in self.store.replicas():
            if replica.state is ReplicaState.LAUNCHED:
                epoch = join_epoch if self.trial(replica.trial_id).members else None
                self.store.update_replica(
                    replica.replica_id,
                    state=ReplicaState.READY,
                    join_epoch=epoch,
                    contact_at=self.now,
                    ready_at=self.now,
                )

    def enter(self, trial_id: str) -> None:
        """Rank 0 enters what was published; those left out go."""
        record = self.trial(trial_id)
        if record.published_members:
            self.store.note_entered(trial_id, record.published)
        for replica in self.store.replicas(trial_id=trial_id):
            if replica.replica_id not in record.published_members:
                self.launcher.end(replica.replica_id, 0)

    def train(self, trial_id: str) -> None:
        """Bring a trial to RUNNING; one that was lost may have to wait for its turn."""
        while not self.store.replicas(trial_id=trial_id):
            self.tick()
        self.all_ready()
        self.tick()
        self.enter(trial_id)
        self.tick()

    def give_hints(self, trial_id: str, replicas: int = 8, progress: float = 100.0) -> None:
        rows = [[1, count, 64, 0.08, 0.08 + 0.002 * (count > 1), 20] for count in (1, 2, replicas)]
        self.store.put_hints(
            trial_id,
            {
                "bounds": {"init_batch": 64, "max_batch": 2048, "min_atomic": 8, "max_atomic": 256},
                "observations": rows,
                "statistics": [1.0, 200.0],
                "progress": progress,
                "target_progress": 1e6,
                "goodput": 800.0,
                "epoch": 3,
            },
        )


def grown(bench: Bench) -> str:
    trial_id = bench.submit()
    bench.train(trial_id)
    bench.give_hints(trial_id)
    bench.tick(30)
    bench.all_ready(join_epoch=3)
    bench.tick()
    bench.enter(trial_id)
    bench.tick()
    return trial_id
