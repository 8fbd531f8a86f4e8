"""Growing 1 -> 2 -> 4 and shrinking back with 120 MB of state: how long survivors stop, against starting anew.

The peer is what systems without live rescaling do, in the same run: save, end, start all replicas cold, load. Joiners
come from the warm fork server, or start cold; survivors should not notice which. Killing one of three replicas is
measured from the signal to the first step that was trained without it.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

from benchmarks.frame import Measurement
from tests.support.rig import Rig

REPEATS = 3
ENTRYPOINT = "benchmarks.rescale_training:main"


@contextmanager
def cluster(*, warm: bool) -> Iterator[Rig]:
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        rig = Rig(Path(folder), fork_server=warm)
        try:
            yield rig
        finally:
            rig.close()


def steps_since(rig: Rig, moment: float, world_size: int) -> list[float]:
    """Times of the steps that rank 0 has made at this size since then."""
    return sorted(
        row["at"] for row in rig.rows() if row["rank"] == 0 and row["at"] > moment and row["world_size"] == world_size
    )


def settle(rig: Rig, moment: float, world_size: int, steps: int = 8) -> list[float]:
    found: list[float] = []

    def enough() -> bool:
        found[:] = steps_since(rig, moment, world_size)
        return len(found) >= steps

    rig.until(enough, f"{steps} steps with {world_size} replicas", seconds=120.0)
    return found


def pauses(*, warm: bool) -> tuple[dict[str, list[float]], dict[str, list[float]], dict[int, list[float]]]:
    """Return pauses by kind of switch, the delays of the steps around them, and step times by size.

    A delay is by how much longer the step took than the next ones at that size (late joiners included).
    """
    stopped: dict[str, list[float]] = {}
    felt: dict[str, list[float]] = {}
    seconds: dict[int, list[float]] = {}
    with cluster(warm=warm) as rig:
        trial_id = rig.submit(1, entrypoint=ENTRYPOINT)
        settle(rig, 0.0, 1)
        size = 1
        for _ in range(REPEATS):
            for wanted in (2, 4, 2, 1):
                moment = time.time()
                rig.want(trial_id, wanted)
                times = settle(rig, moment, wanted)
                pause = max((row["pauses"] or [0.0])[-1] for row in rig.rows() if row["at"] == times[-1])
                usual = [after - before for before, after in pairwise(times)]
                last = max(row["at"] for row in rig.rows() if row["rank"] == 0 and row["at"] < times[0])
                switch = f"{size} -> {wanted}"
                stopped.setdefault(switch, []).append(pause)
                felt.setdefault(switch, []).append(times[0] - last - statistics.median(usual))
                seconds.setdefault(wanted, []).extend(usual)
                size = wanted
        rig.want(trial_id, 0)
    return stopped, felt, seconds


def restart() -> float:
    """Seconds without training when 1 replica is ended and 2 are started cold from its checkpoint."""
    with cluster(warm=False) as rig:
        trial_id = rig.submit(1, entrypoint=ENTRYPOINT)
        settle(rig, 0.0, 1)
        moment = time.time()
        rig.want(trial_id, 0)
        rig.until(lambda: not rig.store.replicas(), "the end of the replica")
        last = max(row["at"] for row in rig.rows())
        rig.want(trial_id, 2)
        first = settle(rig, moment, 2, steps=1)[0]
        return float(first - last)


def recovery() -> float:
    """Seconds from the kill of one of three replicas to the first step of the other two."""
    with cluster(warm=True) as rig:
        trial_id = rig.submit(3, entrypoint=ENTRYPOINT)
        settle(rig, 0.0, 3)
        victim = rig.members(trial_id)[1]
        moment = time.time()
        rig.policy.wanted[trial_id] = 2
        rig.kill(victim)
        return settle(rig, moment, 2, steps=1)[0] - moment


def measure() -> list[Measurement]:
    warm, felt, seconds = pauses(warm=True)
    cold, felt_cold, _ = pauses(warm=False)
    anew = statistics.median(restart() for _ in range(REPEATS))
    rows = []
    for joiners, found, noticed in (("warm", warm, felt), ("cold", cold, felt_cold)):
        for switch, values in found.items():
            before, after = (int(size) for size in switch.split(" -> "))
            grows = after > before
            usual = statistics.median(seconds[before])
            allowed = 0.05 + usual if grows else 0.005
            pause = statistics.median(values)
            rows.append(
                Measurement(
                    what=f"{switch}, {joiners} joiners, pause",
                    ours=1e3 * pause,
                    peer=1e3 * allowed,
                    unit="ms",
                    peer_name="50 ms and a step" if grows else "5 ms",
                    target=1.0,
                    details={"all_ms": [1e3 * value for value in values], "step_ms_before": 1e3 * usual},
                )
            )
            rows.append(
                Measurement(
                    what=f"{switch}, {joiners} joiners, longer than a usual step",
                    ours=1e3 * statistics.median(noticed[switch]),
                    peer=1e3 * allowed,
                    unit="ms",
                    peer_name="50 ms and a step" if grows else "5 ms",
                    details={"all_ms": [1e3 * value for value in noticed[switch]]},
                )
            )
            if switch == "1 -> 2":
                rows.append(
                    Measurement(
                        what=f"{switch}, {joiners} joiners, against a restart",
                        ours=1e3 * pause,
                        peer=1e3 * anew,
                        unit="ms",
                        peer_name="checkpoint and cold restart",
                        target=1 / 50,
                    )
                )
    rows.append(
        Measurement(
            what="one of 3 killed, to training again",
            ours=statistics.median(recovery() for _ in range(REPEATS)),
            peer=1.0,
            unit="s",
            peer_name="the goal",
            target=1.0,
        )
    )
    return rows
