"""Seconds from the decision to go on from a running trial until the one that does steps, 120 MB of state.

Measured to the beginning of its first step and to its end, which is the training's own. Beside it the same trial begins
without a parent: what the state itself costs is the difference. The parent trains on.
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

    def first_step(self, trial_id: str) -> dict[str, Any]:
        deadline = time.monotonic() + 60.0
        while not (steps := self.steps(trial_id)):
            assert time.monotonic() < deadline, self._client.request("GET", f"/trials/{trial_id}")["reason"]
            time.sleep(0.002)
        return steps[0]

    def seconds_to_first_step(self, parent: str = "") -> tuple[float, float]:
        """Return those until it begins, and until it is over."""
        began = time.time()
        trial_id = self.begin(parent)
        step = self.first_step(trial_id)
        self._client.request("POST", f"/trials/{trial_id}/cancel", {})
        while any(row["gone_at"] is None for row in self._client.request("GET", f"/trials/{trial_id}")["replicas"]):
            time.sleep(0.05)
        return step["began"] - began, step["at"] - began


def measure() -> list[Measurement]:
    os.environ["OMP_NUM_THREADS"] = "1"
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:
        folder = Path(name)
        scheduler = EmbeddedScheduler(folder / "state", slots=2)
        client = scheduler.start()
        try:
            forks = Forks(folder, client)
            parent = forks.begin()
            forks.first_step(parent)
            forks.seconds_to_first_step()
            pairs = [(forks.seconds_to_first_step(parent), forks.seconds_to_first_step()) for _ in range(FORKS)]
        finally:
            client.close()
            scheduler.stop()
    return [
        Measurement(
            what=f"from the decision until a trial that goes on from a running one {does} its first step, 120 MB",
            ours=statistics.median(forked[place] for forked, _ in pairs),
            peer=MOST_SECONDS,
            unit="s",
            peer_name="the most it may take",
            target=1.0,
            details={
                "without_a_parent": statistics.median(fresh[place] for _, fresh in pairs),
                "forks": [forked[place] for forked, _ in pairs],
            },
        )
        for place, does in enumerate(("begins", "ends"))
    ]
