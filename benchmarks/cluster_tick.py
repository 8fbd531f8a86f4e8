"""One look of a cluster's scheduler at 1,000 trials, 4,000 pods and 500 nodes, and the memory that it has then.

Everything is the live system's but the API server: store, launcher, loop and policy work on objects that were made for
this, as the watches would have them. In a process of its own, whose memory is the scheduler's.
"""

from __future__ import annotations

import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.frame import Measurement

TRIALS, PODS_A_TRIAL, NODES, SLOTS = 1000, 4, 500, 8
LOOKS = 15
TICK_SECONDS = 1.0
MEMORY_MB = 500.0


def main() -> None:
    """Build the cluster in a child process, look at it, and print what that took."""
    from dataclasses import replace

    import psutil

    from dist_core.goodput import BatchBounds, Configuration, GradientStatistics, Hints, Observation
    from scheduler.kubernetes.housekeeping import Housekeeping
    from scheduler.kubernetes.placeholders import Placeholders
    from scheduler.loop.control_loop import ControlLoop
    from scheduler.loop.settings import LoopSettings
    from scheduler.policy import policy_by_name
    from tests.support.cluster_objects import node
    from tests.support.fake_cluster import FakeClusterApi
    from trials.kubernetes.pods.launcher import KubernetesLauncher
    from trials.kubernetes.resources.store import KubernetesTrialStore
    from trials.kubernetes.settings import ClusterSettings
    from trials.record import ReplicaState, Study
    from trials.spec import TrialSpec

    api = FakeClusterApi()
    settings = ClusterSettings(image="i:1")

    class View:
        version = 0
        machines = [node(f"n{index:04d}", SLOTS) for index in range(NODES)]  # noqa: RUF012  # made once
        known: list[dict[str, Any]] = []  # noqa: RUF012  # made once

        def nodes(self) -> list[dict[str, Any]]:
            return self.machines

        def pods(self) -> list[dict[str, Any]]:
            return self.known

        def quotas(self) -> list[dict[str, Any]]:
            return []

        def catch_up(self) -> None:
            self.version += 1
            self.known = [document for (plural, _, _), document in api.objects.items() if plural == "pods"]
            for pod in self.known:
                pod.setdefault("status", {})["phase"] = "Running"

    chance = random.Random(0)
    view = View()
    store = KubernetesTrialStore(api, settings)
    launcher = KubernetesLauncher(api, view, settings, owner_of=store.owner_of)
    clock = time.time
    loop = ControlLoop(
        store,
        launcher,
        policy_by_name("goodput"),
        LoopSettings(
            state_dir=Path(tempfile.mkdtemp()),
            api_url=lambda: "http://10.0.0.1:7300",
            replica_token=lambda trial: "token",
            base_environ={},
            silence_seconds=1e9,
        ),
    )
    bounds = BatchBounds(init_batch=64, max_batch=4096, min_atomic=8, max_atomic=256)
    for number in range(TRIALS):
        study = f"study-{number % 12}"
        if number < 12:
            store.put_study(Study(name=study))
        # All slots are asked for, and each trial's minimum is what it holds: the cluster is full and at rest.
        spec = TrialSpec(
            study=study, number=number, entrypoint="m:f", min_replicas=PODS_A_TRIAL, max_replicas=2 * PODS_A_TRIAL
        )
        trial = store.submit(spec, clock())
        slower = chance.uniform(0.5, 3.0)
        rows = tuple(
            Observation(Configuration(1, replicas, 64), 0.05 * slower, (0.05 + 0.01 * (replicas > 1)) * slower, 40)
            for replicas in (1, 2, 4)
        )
        hints = Hints(
            bounds=bounds,
            observations=rows,
            statistics=GradientStatistics(sqr=1.0, var=chance.uniform(1.0, 60.0)),
            progress=chance.uniform(1e3, 1e5),
            target_progress=2e5,
        )
        store.put_hints(trial.trial_id, hints.to_json())
    view.catch_up()
    loop.tick()
    view.catch_up()
    # What replicas would do: come up, be let in, and train.
    for _ in range(4):
        for replica in store.replicas():
            if replica.state is ReplicaState.LAUNCHED:
                store.update_replica(replica.replica_id, state=ReplicaState.READY, contact_at=clock(), ready_at=clock())
        loop.tick()
        for trial in store.trials():
            if trial.switching:
                store.note_entered(trial.trial_id, trial.published)
        view.catch_up()
    for trial in store.trials():
        store.save_trial(replace(trial, rescaled_at=clock() - 3600.0))
    keeping = Housekeeping(store, loop, settings, Placeholders(api, settings, view.pods, view.nodes))
    keeping.look()
    pods, running = len(view.known), sum(trial.state.value == "running" for trial in store.trials())
    times, writes = [], []
    for _ in range(LOOKS):
        view.version += 1
        before, began = len(api.calls), time.perf_counter()
        loop.tick()
        keeping.look()
        times.append(time.perf_counter() - began)
        writes.append(len(api.calls) - before)
    store.close()
    print(
        json.dumps(
            {
                "seconds": statistics.median(times),
                "longest": max(times),
                "calls": statistics.median(writes),
                "megabytes": psutil.Process().memory_info().rss / 1e6,
                "pods": pods,
                "running": running,
            }
        )
    )


def measure() -> list[Measurement]:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.cluster_tick"], capture_output=True, text=True, check=True, timeout=600
    )
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["pods"] == TRIALS * PODS_A_TRIAL, found
    return [
        Measurement(
            what=f"a look at {TRIALS} trials, {found['pods']} pods, {NODES} nodes",
            ours=found["seconds"],
            peer=TICK_SECONDS,
            unit="s",
            peer_name="the limit",
            target=1.0,
            details=found,
        ),
        Measurement(
            what="memory of the scheduler then, the stand-in for the API server included",
            ours=found["megabytes"],
            peer=MEMORY_MB,
            unit="MB",
            peer_name="the limit",
            target=1.0,
        ),
    ]


if __name__ == "__main__":
    main()
