"""Eight weeks of sweeps in virtual time on a real database: memory, database and looks level off.

Every hour a sweep of eight trials comes, trains, reports and ends; what is a week old is forgotten. Store, loop, policy
and retention are the live system's; replicas do at once what they are told.
"""

from __future__ import annotations

import gc
import itertools
import json
import math
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

from benchmarks.frame import Measurement
from scheduler.host.retention import Retention
from scheduler.loop.control_loop import ControlLoop
from scheduler.loop.settings import LoopSettings
from scheduler.policy import policy_by_name
from trials.launch import InMemoryLauncher
from trials.record import Outcome, ReplicaState, Report, Study
from trials.spec import TrialSpec
from trials.store import sql_store

WEEKS, TRIALS_AN_HOUR, REPORTS = 8, 8, 8
WEEK = 7 * 86400.0
LOOKS_AN_HOUR, LOOK_SECONDS = 16, 2.0
"""The sweep trains in all of these, one after the other; nothing happens in the rest of the hour."""
LEVEL = 1.1
"""Largest ratio of the last weeks' to those after the first week was forgotten."""


class Weeks:
    def __init__(self, folder: Path) -> None:
        self.now = 1.8e9
        self.database = folder / "trials.db"
        self.store = sql_store(f"sqlite:///{self.database}")
        self.launcher = InMemoryLauncher({"n0": 4, "n1": 4})
        settings = LoopSettings(
            state_dir=folder,
            api_url=lambda: "http://x",
            replica_token=lambda name: "t",
            base_environ={},
            # These replicas do not call; they do not hang either.
            silence_seconds=math.inf,
        )
        self.loop = ControlLoop(
            self.store,
            self.launcher,
            policy_by_name("goodput"),
            settings,
            clock=lambda: self.now,
            monotonic=lambda: self.now,
        )
        self.retention = Retention(self.store, self.loop, WEEK, clock=lambda: self.now)
        self.seconds: list[float] = []
        """Seconds of each look since they were last taken."""

    def hour(self, number: int) -> None:
        """A sweep from its first trial to its last."""
        study = f"sweep-{number}"
        self.store.put_study(Study(name=study, title="sweep", owner="o", owner_seen_at=self.now))
        trials = [
            self.store.submit(TrialSpec(study=study, number=each, entrypoint="m:f", max_replicas=4), self.now).trial_id
            for each in range(TRIALS_AN_HOUR)
        ]
        for look in range(LOOKS_AN_HOUR):
            self.store.touch_study(study, "o", self.now)
            self.follow()
            if look >= LOOKS_AN_HOUR - REPORTS - 1:
                self.train(trials, look)
            if look == LOOKS_AN_HOUR - 2:
                for trial_id in trials:
                    self.store.set_outcome(trial_id, Outcome(kind="value", value=0.5))
            self.look(LOOK_SECONDS)
        self.store.disown_study(study, "o")
        for replica in self.store.replicas():
            self.launcher.end(replica.replica_id, 0)
        self.look(3600.0 - LOOKS_AN_HOUR * LOOK_SECONDS)

    def look(self, seconds: float) -> None:
        began = time.thread_time()
        self.loop.tick()
        self.retention.look()
        self.seconds.append(time.thread_time() - began)
        # A launcher with processes keeps no such list.
        self.launcher.stopped.clear()
        self.now += seconds

    def follow(self) -> None:
        """Replicas stand ready, enter what was published, and go where they are left out."""
        for replica in self.store.replicas():
            if replica.state is ReplicaState.LAUNCHED:
                self.store.update_replica(
                    replica.replica_id,
                    state=ReplicaState.READY,
                    contact_at=self.now,
                    ready_at=self.now,
                    join_epoch=0 if self.store.trial(replica.trial_id).members else None,
                )
        for trial in self.store.trials(live_only=True):
            if trial.switching:
                self.store.note_entered(trial.trial_id, trial.published)
                for left_out in set(trial.members) - set(trial.published_members):
                    self.launcher.end(left_out, 0)

    def train(self, trials: list[str], look: int) -> None:
        rows = [[1, count, 64, 0.08, 0.08 + 0.002 * (count > 1), 20] for count in (1, 2, 4)]
        for index, trial_id in enumerate(trials):
            hints = {
                "bounds": {"init_batch": 64, "max_batch": 2048, "min_atomic": 8, "max_atomic": 256},
                "observations": rows,
                "statistics": [1.0, 200.0],
                "progress": 100.0 * look,
                "target_progress": 1e6,
                "goodput": 800.0,
                "epoch": 0,
            }
            self.store.put_hints(trial_id, hints)
            self.store.add_report(Report(trial_id, look, 1.0 / (1 + look + index), 100.0 * look))

    def measures(self) -> tuple[float, float, float]:
        """Memory and database in MB, and seconds a look, since the last time."""
        gc.collect()
        memory = psutil.Process().memory_info().rss / 2**20
        files = sum(path.stat().st_size for path in self.database.parent.glob("trials.db*")) / 2**20
        looks, self.seconds = self.seconds, []
        return memory, files, statistics.median(looks)


def main() -> None:
    """Run in a process whose memory is the scheduler's alone, and print a line for each week."""
    # In memory, where there is such a folder: half a million flushes of a disk take an hour.
    memory_disk = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory_disk if memory_disk.is_dir() else None) as folder:
        weeks = Weeks(Path(folder))
        hours = itertools.count()
        for _ in range(WEEKS):
            for _ in range(7 * 24):
                weeks.hour(next(hours))
            print(json.dumps([*weeks.measures(), len(weeks.store.trials())]), flush=True)
        weeks.store.close()


def measure() -> list[Measurement]:
    found = []
    command = [sys.executable, "-m", "benchmarks.eight_weeks"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            found.append(json.loads(line))
            memory, files, seconds, trials = found[-1]
            week = f"week {len(found)}: {trials} trials, {memory:.0f} MB of memory, {files:.1f} MB of database"
            print(f"  {week}, {1e3 * seconds:.2f} ms a look", flush=True)
    if len(found) != WEEKS:
        raise RuntimeError(f"the process ended after {len(found)} of {WEEKS} weeks")
    early, late = found[1:3], found[-2:]
    names = (("memory", "MB"), ("database", "MB"), ("a look, processor time", "s"))
    return [
        Measurement(
            what=f"{name}, weeks 7 and 8 of {TRIALS_AN_HOUR} trials an hour",
            ours=statistics.mean(week[index] for week in late),
            peer=statistics.mean(week[index] for week in early),
            unit=unit,
            peer_name="weeks 2 and 3",
            target=LEVEL,
            details={"weeks": [week[index] for week in found]},
        )
        for index, (name, unit) in enumerate(names)
    ]


if __name__ == "__main__":
    main()
