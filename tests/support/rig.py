"""A real scheduler with real replica processes, whose policy is the test: it says how many replicas it wants when."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from scheduler.snapshot import Grant, Snapshot
from tests.support.project import ROOT
from tests.support.served import ServedLoop
from tests.support.unhurried import SLOWLY
from tests.support.waiting import until
from trials.launch import LocalLauncher
from trials.record import Reason, ReplicaRecord, TrialRecord
from trials.spec import TrialSpec
from trials.store import sql_store

PRELOAD = ("dist_core.replica_preload",)


class ScriptedPolicy:
    name = "scripted"

    def __init__(self) -> None:
        self.wanted: dict[str, int] = {}
        self.layouts: dict[str, str] = {}

    def allocate(self, snapshot: Snapshot) -> dict[str, Grant]:
        reason = Reason(code="script", sentence="the test wants it so")
        return {
            view.trial_id: Grant(
                placement={"localhost": self.wanted.get(view.trial_id, 0)},
                reason=reason,
                layout=self.layouts.get(view.trial_id, ""),
            )
            for view in snapshot.trials
        }


class Rig:
    """``launcher``: one that others use as well, and that stays when the rig is closed."""

    def __init__(
        self,
        folder: Path,
        slots: int = 4,
        *,
        launcher: LocalLauncher | None = None,
        fork_server: bool = True,
        silence_seconds: float = 45.0,
    ) -> None:
        self.folder = folder
        self.trace = folder / "trace"
        self.trace.mkdir()
        self.store = sql_store(f"sqlite:///{folder / 'trials.db'}")
        self.launcher = launcher or LocalLauncher(slots=slots, preload=PRELOAD, fork_server=fork_server)
        self._owns_launcher = launcher is None
        self.policy = ScriptedPolicy()
        self._served = ServedLoop(
            folder,
            self.store,
            self.launcher,
            self.policy,
            environ={"TRACE_DIR": str(self.trace)},
            silence_seconds=silence_seconds,
        )
        self.loop = self._served.loop
        self.launcher.on_change = self.loop.wake

    def close(self) -> None:
        for replica in self.store.replicas():
            self.launcher.stop(replica, force=True)
        self._served.close()
        if self._owns_launcher:
            self.launcher.close()
        self.store.close()

    def submit(
        self,
        replicas: int,
        *,
        entrypoint: str = "tests.support.training_code:main",
        slots_per_replica: int = 1,
        layout: str = "",
        replica_sizes: tuple[int, ...] = (),
        command: Sequence[str] = (),
        **environ: str,
    ) -> str:
        """``command``: what runs in place of ``entrypoint``, as a process of the replica."""
        if command:
            entrypoint = "tuner_bridge.in_replica.commands:run"
        spec = TrialSpec(
            study="s",
            number=0,
            entrypoint=entrypoint,
            payload={"command": list(command)},
            max_replicas=8,
            slots_per_replica=slots_per_replica,
            replica_sizes=replica_sizes,
            python_path=(str(ROOT),),
            working_dir=str(self.folder),
            environ={"STEP_SECONDS": "0.02", "EPOCHS": "8", **environ},
        )
        trial_id = self.store.submit(spec, time.time()).trial_id
        self.want(trial_id, replicas * slots_per_replica, layout)
        return trial_id

    def want(self, trial_id: str, slots: int, layout: str = "") -> None:
        """``layout``: how replicas are to hold the model; empty: as they do."""
        self.policy.wanted[trial_id] = slots
        if layout:
            self.policy.layouts[trial_id] = layout
        self.loop.wake()

    def trial(self, trial_id: str) -> TrialRecord:
        return self.store.trial(trial_id)

    def members(self, trial_id: str) -> list[ReplicaRecord]:
        """Replicas of the generation that trains, by rank."""
        by_id = {replica.replica_id: replica for replica in self.store.replicas(trial_id=trial_id)}
        return [by_id[name] for name in self.trial(trial_id).members if name in by_id]

    def until(self, condition: Callable[[], bool], what: str, seconds: float = 60.0) -> None:
        until(condition, seconds, lambda: f"{what}\n{self.story()}\n{self.logs()}")

    def until_size(self, trial_id: str, replicas: int) -> None:
        def reached() -> bool:
            record = self.trial(trial_id)
            assert not record.state.is_final, f"over before it had {replicas} replicas\n{self.story()}\n{self.logs()}"
            return len(record.members) == replicas and not record.switching

        with self.unhurried():
            self.until(reached, f"{replicas} replicas")

    @contextmanager
    def unhurried(self) -> Iterator[None]:
        """Within, the training takes its time: on a busy machine joiners would come to a trial that is over."""
        slowly = self.trace / SLOWLY
        slowly.touch()
        yield
        slowly.unlink()

    def until_over(self, trial_id: str) -> TrialRecord:
        self.until(lambda: self.trial(trial_id).state.is_final, "the end of the trial")
        return self.trial(trial_id)

    def until_step(self, steps: int) -> None:
        self.until(lambda: self.latest_step() >= steps, f"step {steps}")

    def latest_step(self) -> int:
        """That any replica has come to; -1 before the first. Asked for often: only last lines are read."""
        last = [path.read_text().rpartition("}\n")[0].rpartition("\n")[2] for path in self.trace.glob("*.jsonl")]
        return max((int(json.loads(line + "}")["step"]) for line in last if line), default=-1)

    def kill(self, replica: ReplicaRecord) -> None:
        assert replica.pid is not None
        os.kill(replica.pid, signal.SIGKILL)

    def rows(self) -> list[dict[str, Any]]:
        # A replica may have been killed in the middle of a line.
        return [
            {**json.loads(line), "replica": path.stem}
            for path in sorted(self.trace.glob("*.jsonl"))
            for line in path.read_text().splitlines()
            if line.endswith("}")
        ]

    def samples_by_epoch(self) -> dict[int, list[int]]:
        """Samples of the steps that counted: of several attempts at a step, the one of the latest generation."""
        latest: dict[int, int] = {}
        for row in self.rows():
            latest[row["step"]] = max(latest.get(row["step"], 0), row["generation"])
        epochs: dict[int, list[int]] = {}
        for row in self.rows():
            if row["generation"] == latest[row["step"]]:
                epochs.setdefault(row["epoch"], []).extend(row["samples"])
        return epochs

    def assert_each_sample_once(self, num_epochs: int, num_samples: int) -> None:
        """In each epoch, counting the steps that counted."""
        epochs = self.samples_by_epoch()
        assert sorted(epochs) == list(range(num_epochs))
        for samples in epochs.values():
            assert sorted(samples) == list(range(num_samples))

    def losses(self) -> list[float]:
        """Mean loss over the global batch of each step that counted."""
        latest: dict[int, int] = {}
        for row in self.rows():
            latest[row["step"]] = max(latest.get(row["step"], 0), row["generation"])
        sums: dict[int, list[float]] = {}
        for row in self.rows():
            if row["generation"] == latest[row["step"]]:
                total = sums.setdefault(row["step"], [0.0, 0])
                total[0] += row["loss"]
                total[1] += len(row["samples"])
        return [sums[step][0] / sums[step][1] for step in sorted(sums)]

    def states_by_generation(self) -> dict[tuple[int, int], set[str]]:
        """Digests of the shared state by (generation, step): one each, when all its replicas began alike."""
        states: dict[tuple[int, int], set[str]] = {}
        for row in self.rows():
            if row["state"] is not None:
                states.setdefault((row["generation"], row["step"]), set()).add(row["state"])
        return states

    def story(self) -> str:
        """What the scheduler knows of each trial."""
        lines = []
        for trial in self.store.trials():
            lines.append(str(replace(trial, outcome=None)))
            lines += [
                f"  {entry.at:.2f} {entry.what}: {entry.reason.sentence}"
                for entry in self.store.history(trial.trial_id)
            ]
            lines += [f"  {row}" for row in self.store.replicas(trial_id=trial.trial_id, live_only=False)]
        return "\n".join(lines)

    def logs(self) -> str:
        return "\n".join(
            f"{path.name}:\n{path.read_text()[-1500:]}" for path in sorted(self.folder.glob("logs/*/*.log"))
        )
