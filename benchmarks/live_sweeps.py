"""Live sweeps on 16 emulated slots against plain ``study.optimize`` with 16 threads that sleep the same steps.

Successive halving over 64 configurations whose trials take 80 s on one slot. Real driver, scheduler, replicas and
rescales; only the arithmetic of a step takes the time of other devices. Each sweep is simulated from its own record
afterwards, which shows how far the simulator's promises can be believed. With ELASTUNE_RAY_PYTHON (an
interpreter that has Ray Tune) the same sweep runs under its ASHA, one slot a trial, and under its
ResourceChangingScheduler, whose trials are as fast with several slots as ours at the batch size that is best for them.
"""

from __future__ import annotations

import json
import logging
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import optuna

from benchmarks.emulated_trial import CONFIGURATIONS, PROFILE, curves, epoch_seconds, sleeps, trains
from benchmarks.frame import Measurement
from scheduler.policy import policy_by_name
from scheduler.simulator.cluster import SimulationSettings
from scheduler.simulator.recorded import RecordedWorld, read_recorded
from trials.terms import Goal, StudyTerms
from tuner_bridge import optimize

SLOTS = 16
ROOT = Path(__file__).resolve().parent.parent
GOALS: tuple[Goal, ...] = ("time_to_best", "makespan")
CONTENDERS = ("plain", "one replica", "default", *GOALS)
RAY = {"ray": [], "ray changing": ["changing"]}
RAY_TARGETS = {"ray": {"makespan": 1 / 1.6, "time to best": 1 / 1.8}, "ray changing": {"makespan": 1 / 1.3}}
KEEP_ONE_IN, MOST_SLOTS, NODE_SLOTS = 4, 8, 4


def sweep(contender: str, n_jobs: int = SLOTS, *, simulates: bool = True, profile: str = PROFILE) -> dict[str, Any]:
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    pruner = optuna.pruners.SuccessiveHalvingPruner(min_resource=1, reduction_factor=KEEP_ONE_IN)
    study = optuna.create_study(direction="maximize", pruner=pruner)
    for row in range(CONFIGURATIONS):
        study.enqueue_trial({"configuration": row})
    began = time.time()
    simulated: dict[str, float] = {}
    if contender == "plain":
        study.optimize(sleeps, n_trials=CONFIGURATIONS, n_jobs=n_jobs)
    else:
        with tempfile.TemporaryDirectory() as folder:
            pictures = os.environ.get("SWEEP_PICTURES")
            optimize(
                study,
                trains,
                n_trials=CONFIGURATIONS,
                n_jobs=n_jobs,
                max_replicas=1 if contender == "one replica" else MOST_SLOTS,
                emulate=f"4x4:{profile}",
                terms=next((StudyTerms(goal=goal) for goal in GOALS if goal == contender), None),
                state_dir=folder,
                # Drawing takes seconds, which belong to no sweep.
                timeline=None if pictures is None else Path(pictures) / contender.replace(" ", "_"),
            )
            ended = time.time()
            simulated = _simulated(Path(folder)) if simulates else {}
    if contender == "plain":
        ended = time.time()
    complete = [trial for trial in study.trials if trial.state is optuna.trial.TrialState.COMPLETE]
    best = max(complete, key=lambda trial: trial.value or 0.0)
    assert best.datetime_complete is not None
    return {
        "makespan": ended - began,
        "time to best": best.datetime_complete.timestamp() - began,
        "best": best.value,
        "finished": len(complete),
        "load": os.getloadavg()[0],
        **simulated,
    }


def ray_sweep(contender: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        described = {
            "values": curves().tolist(),
            "seconds": epoch_seconds(NODE_SLOTS, MOST_SLOTS),
            "slots": SLOTS,
            "keep_one_in": KEEP_ONE_IN,
        }
        (Path(folder) / "sweep.json").write_text(json.dumps(described))
        script = ROOT / "benchmarks" / "peers" / "halving_ray.py"
        done = subprocess.run(
            [os.environ["ELASTUNE_RAY_PYTHON"], str(script), folder, *RAY[contender]],
            capture_output=True,
            text=True,
            check=True,
        )
    return {**json.loads(done.stdout.splitlines()[-1]), "load": os.getloadavg()[0]}


def _simulated(state_dir: Path) -> dict[str, float]:
    """Recorded and simulated times of a sweep that has run on this folder, from its first submission."""
    recorded = read_recorded(state_dir)
    settings = SimulationSettings(
        nodes=4,
        slots_per_node=4,
        decide_every_seconds=0.0,
        rescale_seconds=recorded.pause_seconds,
        timing=recorded.timing,
    )
    world = RecordedWorld(recorded, policy_by_name("goodput"), settings)
    ends = {job.name: job.finished_at for job in world.run().jobs}
    finished = [trial for trial in recorded.trials if trial.outcome.kind == "value"]
    best = max(finished, key=lambda trial: float(trial.outcome.value))
    assert best.finished_at is not None
    return {
        "recorded makespan": max(trial.finished_at or 0.0 for trial in recorded.trials),
        "simulated makespan": max(ends.values()),
        "recorded time to best": best.finished_at,
        "simulated time to best": ends[best.submission.name],
        "idle": recorded.ran.idle_share,
        "undone": recorded.ran.undone / max(1, recorded.ran.rescales),
    }


def measure() -> list[Measurement]:
    seeds = range(int(os.environ.get("SWEEP_SEEDS", "5")))
    peers = tuple(RAY) if "ELASTUNE_RAY_PYTHON" in os.environ else ()
    if not peers:
        print("ELASTUNE_RAY_PYTHON is not set: no rows for Ray Tune")
    results: dict[str, list[dict[str, Any]]] = {contender: [] for contender in (*CONTENDERS, *peers)}
    for seed in seeds:
        for contender in results:
            results[contender].append(_in_a_process_of_its_own(contender, seed))
    rows = [
        Measurement(
            what=f"default: {what}",
            ours=statistics.median([each[what] for each in results["default"]]),
            peer=statistics.median([each[what] for each in results[name]]),
            unit="s",
            peer_name="Ray Tune's ASHA" if name == "ray" else "Ray Tune's ResourceChangingScheduler",
            target=target,
            details={"runs": results["default"], "peer": results[name]},
        )
        for name in peers
        for what, target in RAY_TARGETS[name].items()
    ]
    targets = {"default": {"makespan": 1 / 1.5, "time to best": 1 / 2.0}, "one replica": {"makespan": 1.03}}
    for contender in CONTENDERS[1:]:
        for what in ("makespan", "time to best"):
            rows.append(
                Measurement(
                    what=f"{contender}: {what}",
                    ours=statistics.median([each[what] for each in results[contender]]),
                    peer=statistics.median([each[what] for each in results["plain"]]),
                    unit="s",
                    peer_name="study.optimize, 16 threads",
                    target=targets.get(contender, {}).get(what),
                    details={"runs": results[contender], "peer": results["plain"]},
                )
            )
            rows += [
                Measurement(
                    what=f"{contender}, seed {seed}: {what}, simulated from its record",
                    ours=run[f"simulated {what}"],
                    peer=run[f"recorded {what}"],
                    unit="s",
                    peer_name="the live sweep (0.9 to 1.1 is as it should be)",
                    target=1.1,
                )
                for seed, run in zip(seeds, results[contender], strict=True)
            ]
    return rows


def _in_a_process_of_its_own(contender: str, seed: int) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.live_sweeps", contender],
        cwd=ROOT,
        env={**os.environ, "SWEEP_SEED": str(seed), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    logging.getLogger(__name__).info("%s seed=%d %s", contender, seed, result)
    return result


if __name__ == "__main__":
    chosen = sys.argv[1]
    print(json.dumps(ray_sweep(chosen) if chosen in RAY else sweep(chosen, *map(int, sys.argv[2:3]))))
