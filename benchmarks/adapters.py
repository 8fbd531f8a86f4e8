"""A trial that trains an adapter beside 120 MB of frozen weights grows from one replica to two: what that stops it for.

Peers, in the same run: the same trial without the frozen weights, and with them in its state.
"""

from __future__ import annotations

import statistics
import time

from benchmarks.frame import Measurement
from benchmarks.rescale_pause import ENTRYPOINT, cluster, settle

REPEATS = 7


LOOP, TRAINER = ENTRYPOINT, "benchmarks.adapter_trainer:main"


def pause(megabytes: int, frozen: str = "keep", entrypoint: str = LOOP) -> list[float]:
    """Milliseconds that the survivor stopped each time."""
    found = []
    with cluster(warm=True) as rig:
        trial_id = rig.submit(1, entrypoint=entrypoint, ADAPTED=str(megabytes), FROZEN=frozen)
        settle(rig, 0.0, 1)
        for _ in range(REPEATS):
            for wanted in (2, 1):
                moment = time.time()
                rig.want(trial_id, wanted)
                times = settle(rig, moment, wanted)
                if wanted == 2:
                    row = next(row for row in rig.rows() if row["at"] == times[-1] and row["rank"] == 0)
                    found.append(1e3 * row["pauses"][-1])
        rig.want(trial_id, 0)
    return found


def measure() -> list[Measurement]:
    return [*_rows(LOOP, "a loop"), *_rows(TRAINER, "Hugging Face's Trainer")]


def _rows(entrypoint: str, by: str) -> list[Measurement]:
    empty = pause(0, "rebuild", entrypoint)
    rebuilt = pause(120, "rebuild", entrypoint)
    kept = pause(120, "keep", entrypoint)
    ours, usual = statistics.median(rebuilt), statistics.median(kept)
    return [
        Measurement(
            what=f"pause of a trial with an adapter, 1 -> 2, beside 120 MB that each replica builds, {by}",
            ours=ours,
            peer=statistics.median(empty) + 10.0,
            unit="ms",
            peer_name="without them, and 10 ms",
            target=1.0,
            details={"rebuilt": rebuilt, "empty": empty},
        ),
        Measurement(
            what=f"the same, against handing them over, {by}",
            ours=ours,
            peer=usual,
            unit="ms",
            peer_name="frozen='keep'",
            details={"kept": kept},
        ),
    ]
