"""A whole sweep in processes of its own: driver, scheduler, fork server, replicas; and what must hold in the end."""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import optuna
import psutil

from tests.support.project import ROOT
from tests.support.waiting import until
from trials.store import SqlBacking
from trials.store.base import SlotInterval
from tuner_bridge.optuna.population import MEMBER, PARENT

EPOCHS = 8
"""Of each trial."""
SCRIPT = """
import os, sys, optuna
from tests.support.objectives import trains
from tuner_bridge import optimize
if __name__ == "__main__":
    folder = sys.argv[1]
    study = optuna.create_study(
        study_name="sweep", storage=f"sqlite:///{folder}/study.db", load_if_exists=True,
        sampler=optuna.samplers.RandomSampler(seed=1), pruner=optuna.pruners.NopPruner(),
    )
    optimize(
        study, trains, n_trials=int(os.environ["TRIALS"]), n_jobs=2, max_replicas=2, slots=3,
        state_dir=sys.argv[2], resume="--resume" in sys.argv,
    )
"""


POPULATION = """
import os, sys, optuna
from tests.support.objectives import counts_its_samples
from tests.support.sweep import exploits_of
from tuner_bridge import Population, optimize
if __name__ == "__main__":
    folder = sys.argv[1]
    study = optuna.create_study(
        study_name="sweep", storage=f"sqlite:///{folder}/study.db", load_if_exists=True,
        sampler=optuna.samplers.RandomSampler(seed=3),
    )
    def enough(study, trial):
        if len(exploits_of(study)) >= int(os.environ["TRIALS"]):
            study.stop()
    optimize(
        study, counts_its_samples, population=Population(size=4, every=2, quantile=0.4, seed=1), slots=2,
        max_replicas=1, state_dir=sys.argv[2], resume="--resume" in sys.argv, callbacks=[enough],
    )
"""
"""A population that ends after so many exploits."""


def exploits_of(study: optuna.Study) -> list[optuna.trial.FrozenTrial]:
    """Stretches that begin with the state of another member."""
    trials = {trial.number: trial for trial in study.get_trials(deepcopy=False)}
    return [
        trial
        for trial in trials.values()
        if PARENT in trial.user_attrs
        and trials[trial.user_attrs[PARENT]].user_attrs[MEMBER] != trial.user_attrs[MEMBER]
    ]


class Sweep:
    def __init__(self, folder: Path, state: Path | None = None, trials: int = 4, script: str = SCRIPT) -> None:
        self.folder = folder
        self.trials = trials
        self.state = state or folder / "state"
        (folder / "tune.py").write_text(script)
        self.process: subprocess.Popen[bytes] | None = None

    def start(self, *arguments: str) -> subprocess.Popen[bytes]:
        environ = {
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "EPOCHS": str(EPOCHS),
            "TRIALS": str(self.trials),
            "OMP_NUM_THREADS": "1",
        }
        # Two processes that make its tables at once would disturb each other.
        assert self._storage
        with open(self.folder / "output", "ab") as output:
            self.process = subprocess.Popen(
                [sys.executable, "tune.py", str(self.folder), str(self.state), *arguments],
                cwd=self.folder,
                env=environ,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        return self.process

    def end(self) -> None:
        """After a test that failed: nothing of it goes on."""
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.wait()

    def output(self) -> str:
        return (self.folder / "output").read_text()

    def scheduler_pid(self) -> int:
        return int(json.loads((self.state / "server.json").read_text())["pid"])

    @functools.cached_property
    def _storage(self) -> optuna.storages.RDBStorage:
        """Made once: it compares its tables with what they should be, and tests look at the study all the time."""
        return optuna.storages.RDBStorage(f"sqlite:///{self.folder}/study.db")

    def study(self) -> optuna.Study:
        return optuna.load_study(study_name="sweep", storage=self._storage)

    def finished(self) -> dict[int, Any]:
        try:
            trials = self.study().trials
        except KeyError:
            return {}
        return {trial.number: (trial.value, trial.params) for trial in trials if trial.state.is_finished()}

    def until(self, condition: Callable[[], bool], seconds: float = 90.0) -> None:
        until(condition, seconds, self.output)

    def left_over(self) -> list[psutil.Process]:
        """Processes of this sweep that still run: replicas by the store's rows, the scheduler by its file."""
        store = SqlBacking(f"sqlite:///{self.state / 'trials.db'}")
        rows = store.replicas(live_only=False)
        store.close()
        found = []
        for pid, started in [(row.pid, row.process_started) for row in rows] + [(self.scheduler_pid(), None)]:
            # It may end at any moment, between two of these calls too.
            with contextlib.suppress(psutil.NoSuchProcess):
                process = psutil.Process(pid) if pid is not None else None
                same = process and (started is None or abs(process.create_time() - started) < 1.0)
                if process and same and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return found


def assert_whole(sweep: Sweep, before: dict[int, Any]) -> None:
    after = sweep.finished()
    assert sorted(after) == list(range(sweep.trials)), sweep.output()
    for number, result in before.items():
        assert after[number] == result
    for trial in sweep.study().trials:
        assert trial.state is optuna.trial.TrialState.COMPLETE
        assert sorted(trial.intermediate_values) == list(range(EPOCHS))
    sweep.until(lambda: not sweep.left_over(), 60.0)
    assert_no_slot_was_used_twice(sweep.state)


def assert_no_slot_was_used_twice(state: Path) -> None:
    store = SqlBacking(f"sqlite:///{state / 'trials.db'}")
    intervals = sorted(map(SlotInterval.of, store.replicas(live_only=False)), key=lambda row: (row.slot, row.began))
    store.close()
    assert intervals
    for before, after in itertools.pairwise(intervals):
        assert before.slot != after.slot or (before.ended is not None and before.ended <= after.began)
