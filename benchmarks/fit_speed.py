"""Fitting the throughput model to 50 observations, against scipy.optimize.least_squares on the same residuals."""

from __future__ import annotations

import statistics
import time

import numpy as np
from scipy.optimize import least_squares

from benchmarks.frame import Measurement
from dist_core.goodput import Configuration, Observation, ThroughputParams, fit_throughput, optim_seconds
from dist_core.goodput.fit import _LOWER, _UPPER, _Problem, _Residuals
from dist_core.goodput.throughput import gradient_seconds

TRUE = ThroughputParams(0.02, 0.001, 0.05, 0.004, 0.01, 0.002, 2.0)


def observations(seed: int) -> list[Observation]:
    """50 configurations with 5% noise and 10% outliers."""
    rng = np.random.default_rng(seed)
    rows = []
    for _ in range(50):
        nodes = int(rng.integers(1, 5))
        replicas = int(rng.integers(nodes, 4 * nodes + 1))
        batch = int(rng.integers(8, 256))
        slow = rng.uniform(2.0, 6.0) if rng.random() < 0.1 else 1.0
        gradient = float(gradient_seconds(TRUE, batch)) * np.exp(0.05 * rng.normal()) * slow
        optim = float(optim_seconds(TRUE, nodes, replicas, batch)) * np.exp(0.05 * rng.normal()) * slow
        rows.append(Observation(Configuration(nodes, replicas, batch), gradient, optim, 10))
    return rows


def measure() -> list[Measurement]:
    ours, warm, peer = [], [], []
    for seed in range(30):
        rows = observations(seed)
        began = time.process_time()
        params = fit_throughput(rows)
        ours.append(time.process_time() - began)
        began = time.process_time()
        fit_throughput(rows, warm_start=params)
        warm.append(time.process_time() - began)
        problem = _Problem.of(rows)
        start = problem.start()
        residuals = _Residuals(problem, start, 0.1)
        began = time.process_time()
        least_squares(
            lambda point, residuals=residuals: residuals(point)[0],
            np.clip(start, _LOWER, _UPPER),
            bounds=(_LOWER - 1e-9, _UPPER + 1e-9),
            loss="soft_l1",
            f_scale=0.15,
        )
        peer.append(time.process_time() - began)
    common = {"unit": "ms", "peer_name": "scipy least_squares (TRF, soft_l1)"}
    peer_ms = 1e3 * statistics.median(peer)
    return [
        Measurement(what="cold fit, 50 observations", ours=1e3 * statistics.median(ours), peer=peer_ms, **common),
        Measurement(what="warm fit, 50 observations", ours=1e3 * statistics.median(warm), peer=peer_ms, **common),
    ]
