"""A real scheduler with real replica processes, whose policy is the test: it says how many replicas it wants when."""

from __future__ import annotations

import json
import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import uvicorn

from scheduler.api.app import create_app
from scheduler.api.service import Service
from scheduler.api.tokens import Tokens
from scheduler.control_loop import ControlLoop, LoopSettings
from scheduler.snapshot import Grant, NodeView, Snapshot
from trials.launch import LocalLauncher
from trials.record import Reason, ReplicaRecord, TrialRecord
from trials.spec import TrialSpec
from trials.store import CachedTrialStore, SqlTrialStore

ROOT = Path(__file__).resolve().parents[2]


class ScriptedPolicy:
    name = "scripted"

    def __init__(self) -> None:
        self.wanted: dict[str, int] = {}

    def allocate(self, snapshot: Snapshot) -> dict[str, Grant]:
        reason = Reason(code="script", sentence="the test wants it so")
        return {
            view.trial_id: Grant(placement={"localhost": self.wanted.get(view.trial_id, 0)}, reason=reason)
            for view in snapshot.trials
        }


class Rig:
    def __init__(
        self, folder: Path, slots: int = 4, *, fork_server: bool = True, silence_seconds: float = 45.0
    ) -> None:
        self.folder = folder
        self.trace = folder / "trace"
        self.trace.mkdir()
        self.store = CachedTrialStore(SqlTrialStore(f"sqlite:///{folder / 'trials.db'}"))
        self.launcher = LocalLauncher(slots=slots, preload=["dist_core.replica_preload"], fork_server=fork_server)
        self.policy = ScriptedPolicy()
        listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        listener.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        tokens = Tokens("a token for the tests")
        box: list[Service] = []
        self.loop = ControlLoop(
            self.store,
            self.launcher,
            self.policy,
            LoopSettings(
                state_dir=folder,
                silence_seconds=silence_seconds,
                api_url=lambda: url,
                replica_token=tokens.for_trial,
                base_environ={**os.environ, "TRACE_DIR": str(self.trace), "OMP_NUM_THREADS": "1"},
            ),
            on_change=lambda: box[0].announce(),
        )
        self.launcher.on_exit = self.loop.wake
        nodes = (NodeView(name="localhost", slots=slots),)
        box.append(Service(store=self.store, loop=self.loop, tokens=tokens, nodes=lambda: nodes))
        config = uvicorn.Config(create_app(box[0]), log_config=None, timeout_graceful_shutdown=1)
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run, kwargs={"sockets": [listener]}, daemon=True)
        self._listener = listener
        self._thread.start()

    def close(self) -> None:
        for replica in self.store.replicas():
            self.launcher.stop(replica, force=True)
        self._server.should_exit = True
        self._thread.join(timeout=20.0)
        self._listener.close()
        self.launcher.close()
        self.store.close()

    def submit(self, replicas: int, *, entrypoint: str = "tests.faults.training_code:main", **environ: str) -> str:
        spec = TrialSpec(
            study="s",
            number=0,
            entrypoint=entrypoint,
            max_replicas=8,
            user_code=(entrypoint.partition(":")[0],),
            python_path=(str(ROOT),),
            working_dir=str(self.folder),
            environ={"STEP_SECONDS": "0.02", "EPOCHS": "8", **environ},
        )
        trial_id = self.store.submit(spec, time.time()).trial_id
        self.want(trial_id, replicas)
        return trial_id

    def want(self, trial_id: str, replicas: int) -> None:
        self.policy.wanted[trial_id] = replicas
        self.loop.wake()

    def trial(self, trial_id: str) -> TrialRecord:
        return self.store.trial(trial_id)

    def members(self, trial_id: str) -> list[ReplicaRecord]:
        """Replicas of the generation that trains, by rank."""
        by_id = {replica.replica_id: replica for replica in self.store.replicas(trial_id=trial_id)}
        return [by_id[name] for name in self.trial(trial_id).members if name in by_id]

    def until(self, condition: Callable[[], bool], what: str, seconds: float = 60.0) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, f"waited {seconds} s for {what}\n{self.story()}\n{self.logs()}"
            time.sleep(0.01)

    def until_size(self, trial_id: str, replicas: int) -> None:
        def reached() -> bool:
            record = self.trial(trial_id)
            return len(record.members) == replicas and not record.switching

        self.until(reached, f"{replicas} replicas")

    def until_over(self, trial_id: str) -> TrialRecord:
        self.until(lambda: self.trial(trial_id).state.is_final, "the end of the trial")
        return self.trial(trial_id)

    def until_step(self, steps: int) -> None:
        def reached() -> bool:
            return max((row["step"] for row in self.rows()), default=-1) >= steps

        self.until(reached, f"step {steps}")

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
