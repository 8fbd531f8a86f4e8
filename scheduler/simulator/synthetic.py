"""A workload for a first look, without any measurements: modelled jobs of four sizes that come at random."""

from __future__ import annotations

import random

from dist_core.goodput import BatchBounds, ThroughputParams
from scheduler.simulator.application import ModelledApplication
from scheduler.simulator.workload import Submission

SMALL = ModelledApplication(
    name="small",
    bounds=BatchBounds(init_batch=128, max_batch=4096, min_atomic=32, max_atomic=1024),
    params=ThroughputParams(0.03, 0.0002, 0.08, 0.002, 0.02, 0.002, 1.6),
    epochs=30,
    steps_per_epoch=390.0,
    first_noise=2.0,
    last_noise=30.0,
)
MEDIUM = ModelledApplication(
    name="medium",
    bounds=BatchBounds(init_batch=20, max_batch=640, min_atomic=5, max_atomic=40),
    params=ThroughputParams(0.05, 0.02, 0.2, 0.003, 0.08, 0.003, 2.0),
    epochs=40,
    steps_per_epoch=400.0,
    first_noise=5.0,
    last_noise=40.0,
)
LARGE = ModelledApplication(
    name="large",
    bounds=BatchBounds(init_batch=200, max_batch=12800, min_atomic=25, max_atomic=200),
    params=ThroughputParams(0.05, 0.004, 0.15, 0.002, 0.06, 0.002, 2.5),
    epochs=60,
    steps_per_epoch=3000.0,
    first_noise=10.0,
    last_noise=100.0,
)
RIGID = ModelledApplication(
    name="rigid",
    bounds=BatchBounds(init_batch=256, max_batch=32768, min_atomic=256),
    params=ThroughputParams(0.01, 0.000002, 1.0, 0.1, 0.5, 0.1, 1.0),
    epochs=10,
    steps_per_epoch=1000.0,
    fixed_batch=4096,
)
SHARES = ((SMALL, 0.45, 4, 1024), (RIGID, 0.25, 1, 4096), (MEDIUM, 0.2, 4, 160), (LARGE, 0.1, 16, 3200))
"""Application, share of the jobs, and what its users ask for: replicas and batch size."""


def synthetic_workload(jobs: int, *, seed: int = 0, mean_seconds_between: float = 180.0) -> list[Submission]:
    """Poisson arrivals of jobs drawn by their shares; the same for the same seed."""
    chance = random.Random(seed)
    at = 0.0
    submissions = []
    for number in range(jobs):
        at += chance.expovariate(1.0 / mean_seconds_between)
        [(application, _, replicas, batch)] = chance.choices(SHARES, weights=[share[1] for share in SHARES])
        submissions.append(
            Submission(
                name=f"{application.name}-{number}",
                at=at,
                application=application,
                num_replicas=replicas,
                batch_size=batch,
            )
        )
    return submissions
