"""Fitting the throughput model to 50 observations: how fast, and how well it predicts configurations it has not seen.

The peer for speed is scipy.optimize.least_squares on the same residuals. The peer for accuracy is AdaptDL's objective
(root mean squared logarithmic errors of gradient and step times, its penalties, its bounds and start), minimised with
L-BFGS-B as it does; held-out configurations have up to 32 replicas.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import numpy as np
from scipy.optimize import least_squares, minimize

from benchmarks.frame import Measurement
from dist_core.goodput import Configuration, Observation, ThroughputParams, fit_throughput, optim_seconds
from dist_core.goodput.fit import _LOWER, _UPPER, _Problem, _Residuals
from dist_core.goodput.throughput import gradient_seconds

TRUE = ThroughputParams(0.02, 0.001, 0.05, 0.004, 0.01, 0.002, 2.0)


def observations(seed: int, *, noise: float = 0.05, outliers: float = 0.1) -> list[Observation]:
    """50 configurations, step times with that much noise and that share of outliers."""
    rng = np.random.default_rng(seed)
    rows = []
    for _ in range(50):
        nodes = int(rng.integers(1, 5))
        replicas = int(rng.integers(nodes, 4 * nodes + 1))
        batch = int(rng.integers(8, 256))
        slow = rng.uniform(2.0, 6.0) if rng.random() < outliers else 1.0
        gradient = float(gradient_seconds(TRUE, batch)) * np.exp(noise * rng.normal()) * slow
        optim = float(optim_seconds(TRUE, nodes, replicas, batch)) * np.exp(noise * rng.normal()) * slow
        rows.append(Observation(Configuration(nodes, replicas, batch), gradient, optim, 10))
    return rows


def as_adaptdl_does(rows: list[Observation]) -> ThroughputParams:
    nodes, replicas, batch = (np.array(column) for column in zip(*(row.configuration[:3] for row in rows), strict=True))
    gradient = np.array([row.gradient_seconds for row in rows])
    optim = np.array([row.optim_seconds for row in rows])

    def objective(point: np.ndarray) -> float:
        params = ThroughputParams(*np.append(np.maximum(point[:6], 1e-8), np.clip(point[6], 1.0, 10.0)))
        errors = [
            np.sqrt(np.mean((np.log(predicted) - np.log(seen)) ** 2))
            for predicted, seen in (
                (gradient_seconds(params, batch), gradient),
                (optim_seconds(params, nodes, replicas, batch), optim),
            )
        ]
        ratios = sum((point[index + 1] / point[index]) ** 2 for index in (0, 2, 4))
        return float(sum(errors) + 1e-3 * (point[6] - 1.0) ** 2 + 1e-2 * ratios)

    start = np.array([1e-1, 1e-2] * 3 + [1.0 + 1e-3])
    bounds = [(1e-8, None)] * 6 + [(1.0, 10.0)]
    found = np.maximum(minimize(objective, start, method="L-BFGS-B", bounds=bounds).x, 1e-8)
    return ThroughputParams(*(float(value) for value in found))


def held_out_error(params: ThroughputParams) -> float:
    """Median relative error of step times in configurations of up to 32 replicas."""
    cases = [(n, r, b) for n in (1, 2, 4, 8) for r in (n, 2 * n, 4 * n) if r <= 32 for b in (8, 32, 128, 512)]
    nodes, replicas, batch = (np.array(column) for column in zip(*cases, strict=True))
    predicted = np.log(optim_seconds(params, nodes, replicas, batch))
    return float(np.median(np.abs(predicted - np.log(optim_seconds(TRUE, nodes, replicas, batch)))))


def accuracy() -> list[Measurement]:
    rows = []
    for what, noise, outliers, target in (
        ("2% noise", 0.02, 0.0, 1.0),
        ("10% noise", 0.1, 0.0, 1.0),
        ("5% noise, 10% outliers", 0.05, 0.1, 0.25),
    ):
        ours, theirs = [], []
        for seed in range(12):
            seen = observations(seed, noise=noise, outliers=outliers)
            params = fit_throughput(seen)
            assert params is not None
            ours.append(held_out_error(params))
            theirs.append(held_out_error(as_adaptdl_does(seen)))
        rows.append(
            Measurement(
                what=f"held-out error, {what}",
                ours=100 * statistics.median(ours),
                peer=100 * statistics.median(theirs),
                unit="%",
                peer_name="AdaptDL's objective",
                target=target,
            )
        )
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
    common: dict[str, Any] = {"unit": "ms", "peer_name": "scipy least_squares (TRF, soft_l1)"}
    peer_ms = 1e3 * statistics.median(peer)
    return [
        Measurement(what="cold fit, 50 observations", ours=1e3 * statistics.median(ours), peer=peer_ms, **common),
        Measurement(what="warm fit, 50 observations", ours=1e3 * statistics.median(warm), peer=peer_ms, **common),
        *accuracy(),
    ]
