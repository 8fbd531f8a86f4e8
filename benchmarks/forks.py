"""Seconds from the decision to go on from a running trial to the first step of the one that does, 120 MB of state.

Beside it the same trial begins without a parent: what the state itself costs is the difference. The parent trains on.
"""

from __future__ import annotations

import json
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.frame import Measurement
from scheduler.client.connection import SchedulerClient
from scheduler.host.embedded import EmbeddedScheduler
from trials.spec import TrialSpec

FORKS = 9
MOST_SECONDS = 0.5
ROOT = str(Path(__file__).parents[1])


class Forks:
    def __init__(self, folder: Path, client: SchedulerClient) -> None:
        self._folder = folder
        self._client = client
        self._number = 0

    def begin(self, parent: str = "") -> str:
        spec = TrialSpec(
            study="forks",
            number=self._number,
            entrypoint="benchmarks.rescale_training:train",
            python_path=(ROOT,),
            preload=("torch",),
            environ={"TRACE_DIR": str(self._folder), "OMP_NUM_THREADS": "1"},
            parent=parent,
            driven=False,
        )
        self._number += 1
        return str(self._client.request("POST", "/trials", spec.to_json())["trial_id"])

    def steps(self, trial_id: str) -> list[dict[str, Any]]:
        lines = [line for path in self._folder.glob(f"{trial_id}-*.jsonl") for line in path.read_text().splitlines()]
        return [json.loads(line) for line in lines]

    def until_it_steps(self, trial_id: str) -> None:
        deadline = time.monotonic() + 60.0
        while not self.steps(trial_id):
            assert time.monotonic() < deadline, self._client.request("GET", f"/trials/{trial_id}")["reason"]
            time.sleep(0.002)

    def seconds_to_first_step(self, parent: str = "") -> float:
        began = time.monotonic()
        trial_id = self.begin(parent)
        self.until_it_steps(trial_id)
        took = time.monotonic() - began
        self._client.request("POST", f"/trials/{trial_id}/cancel", {})
        while any(row["gone_at"] is None for row in self._client.request("GET", f"/trials/{trial_id}")["replicas"]):
            time.sleep(0.05)
        return took


def measure() -> list[Measurement]:
    os.environ["OMP_NUM_THREADS"] = "1"
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:
        folder = Path(name)
        scheduler = EmbeddedScheduler(folder / "state", slots=2)
        client = scheduler.start()
        try:
            forks = Forks(folder, client)
            parent = forks.begin()
            forks.until_it_steps(parent)
            forks.seconds_to_first_step()
            pairs = [(forks.seconds_to_first_step(parent), forks.seconds_to_first_step()) for _ in range(FORKS)]
        finally:
            client.close()
            scheduler.stop()
    forked, fresh = (statistics.median(each) for each in zip(*pairs, strict=True))
    return [
        Measurement(
            what="from the decision to the first step of a trial that goes on from a running one, 120 MB",
            ours=forked,
            peer=MOST_SECONDS,
            unit="s",
            peer_name="the most it may take",
            target=1.0,
            details={"without_a_parent": fresh, "forks": [pair[0] for pair in pairs]},
        )
    ]
