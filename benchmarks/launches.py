"""Start of trials: trivial ones a second against NNI and Ray Tune, and single launches in milliseconds.

ELASTUNE_RAY_PYTHON and ELASTUNE_NNI_PYTHON name interpreters that have these projects, and the same torch; without
them their rows are left out. Trials a second are counted from the first one's end to the last one's, two at a time, so
that nobody's start-up is in them.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import optuna

from benchmarks import trivial
from benchmarks.frame import Measurement
from scheduler.client.connection import SchedulerClient
from scheduler.host.embedded import EmbeddedScheduler
from tests.support.rig import Rig
from trials.spec import TrialSpec
from tuner_bridge import optimize

TRIALS = 40
LAUNCHES = 25
JOINS = 10
HERE = Path(__file__).parent
ROOT = str(HERE.parent)
NNI_PORT = 18080


def times(folder: Path, name: str) -> list[float]:
    path = folder / name
    return sorted(map(float, path.read_text().split())) if path.exists() else []


def rate(folder: Path) -> float:
    ends = times(folder, "ends")
    assert len(ends) == TRIALS, f"{len(ends)} of {TRIALS} trials ended"
    return (len(ends) - 1) / (ends[-1] - ends[0])


def ours(folder: Path) -> float:
    os.environ["TRIVIAL_FOLDER"] = str(folder)
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=0))
    optimize(study, trivial.objective, n_trials=TRIALS, n_jobs=2, slots=2, state_dir=folder / "state", live=False)
    return rate(folder)


def peer(variable: str, script: str, *arguments: str) -> Callable[[Path], float]:
    def run(folder: Path) -> float:
        environ = {**os.environ, "RAY_CHDIR_TO_TRIAL_DIR": "0", "RAY_DEDUP_LOGS": "0"}
        environ["PATH"] = f"{Path(os.environ[variable]).parent}:{environ['PATH']}"
        command = [os.environ[variable], str(HERE / "peers" / script), str(folder), str(TRIALS), *arguments]
        subprocess.run(command, check=True, env=environ, cwd=folder, capture_output=True, timeout=600)
        return rate(folder)

    return run


def in_new_folder(run: Callable[[Path], float]) -> float:
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        return run(Path(folder))


def submit(client: SchedulerClient, number: int) -> float:
    spec = TrialSpec(study="s", number=number, entrypoint="benchmarks.trivial:main", python_path=(ROOT,))
    at = time.time()
    client.request("POST", "/trials", spec.to_json())
    return at


def until(folder: Path, name: str, count: int) -> None:
    deadline = time.monotonic() + 60.0
    while len(times(folder, name)) < count:
        assert time.monotonic() < deadline, f"{name}: {len(times(folder, name))} of {count}"
        time.sleep(0.002)


def single_launches(folder: Path, *, warm: bool) -> tuple[list[float], list[float]]:
    """Seconds from submission to the first line of user code, and from a trial's end to the next one's first line."""
    os.environ["TRIVIAL_FOLDER"] = str(folder)
    scheduler = EmbeddedScheduler(folder / "state", slots=1, fork_server=warm)
    client = scheduler.start()
    count = LAUNCHES if warm else 5
    try:
        submit(client, 0)
        until(folder, "ends", 1)
        starts = []
        for number in range(1, count + 1):
            time.sleep(0.3)
            at = submit(client, number)
            until(folder, "ends", number + 1)
            starts.append(times(folder, "begins")[-1] - at)
        for number in range(count + 1, 2 * count + 2):
            submit(client, number)
        until(folder, "ends", 2 * count + 2)
        begins, ends = times(folder, "begins"), times(folder, "ends")
        gaps = [begins[index + 1] - ends[index] for index in range(count + 1, 2 * count + 1)]
    finally:
        client.close()
        scheduler.stop()
    return starts, gaps


def joins(folder: Path) -> list[float]:
    """Seconds from a joiner's launch until it stands at its first training step."""
    rig = Rig(folder)
    found = []
    try:
        trial_id = rig.submit(1, STEP_SECONDS="0.002", EPOCHS="4000")
        rig.until_size(trial_id, 1)
        rig.until_step(20)
        for _ in range(JOINS):
            rig.want(trial_id, 2)
            rig.until_size(trial_id, 2)
            joiner = rig.members(trial_id)[1]
            assert joiner.ready_at is not None
            found.append(joiner.ready_at - joiner.launched_at)
            rig.want(trial_id, 1)
            rig.until_size(trial_id, 1)
            rig.until(lambda: len(rig.store.replicas()) == 1, "the leaver to leave")
        rig.want(trial_id, 0)
    finally:
        rig.close()
    return found


def measure() -> list[Measurement]:
    rows = []
    mine = in_new_folder(ours)
    for name, variable, target, run in (
        ("NNI local", "ELASTUNE_NNI_PYTHON", 10.0, peer("ELASTUNE_NNI_PYTHON", "trivial_nni.py", str(NNI_PORT))),
        ("Ray Tune, a process each", "ELASTUNE_RAY_PYTHON", 5.0, peer("ELASTUNE_RAY_PYTHON", "trivial_ray.py")),
    ):
        if variable not in os.environ:
            print(f"{variable} is not set: no row for {name}")
            continue
        rows.append(
            Measurement(
                what=f"{TRIALS} trivial trials, two at a time",
                ours=mine,
                peer=in_new_folder(run),
                unit="trials/s",
                peer_name=name,
                lower_is_better=False,
                target=target,
            )
        )
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        cold, _ = single_launches(Path(folder), warm=False)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        warm, gaps = single_launches(Path(folder), warm=True)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        joined = joins(Path(folder))
    for what, seconds, most in (
        ("submission to the first line of user code, warm", warm, 0.1),
        ("end of a trial to the first line of the next, warm", gaps, 0.1),
        ("launch of a joiner to its first training step, warm", joined, 0.05),
    ):
        rows.append(
            Measurement(
                what=what,
                ours=1e3 * statistics.median(seconds),
                peer=1e3 * most,
                unit="ms",
                peer_name="the longest it may take",
                target=1.0,
                details={"all_ms": [1e3 * each for each in seconds]},
            )
        )
    rows.append(
        Measurement(
            what="submission to the first line of user code, warm against cold",
            ours=1e3 * statistics.median(warm),
            peer=1e3 * statistics.median(cold),
            unit="ms",
            peer_name="a cold start",
        )
    )
    return rows
