"""Step time and throughput of a data-parallel job as a function of its allocation and batch size.

The model and its symbols are those of Pollux (OSDI'21, section 3.2). With m examples per forward and backward pass
on each of K replicas spread over N nodes, and s accumulation steps before the one that reduces gradients:

    T_grad(m)    = alpha_c + beta_c m                                       computing one gradient
    T_sync(N, K) = 0                                      for K = 1
                 = alpha_r + beta_r max(K - 2, 0)         for K > 1 on one node
                 = alpha_n + beta_n max(K - 2, 0)         for N > 1
    T_optim      = (T_grad^gamma + T_sync^gamma)^(1/gamma)                  overlapped reduction, eq. 10
    T_iter       = s T_grad + T_optim                                       eq. 11
    throughput   = K m (s + 1) / T_iter                                     examples per second, eq. 8
"""

from __future__ import annotations

from dataclasses import astuple, dataclass, fields, replace

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float64]

SMALLEST_SECONDS = 1e-8
"""Stands for zero inside logarithms; far below anything a clock resolves."""


@dataclass(frozen=True, slots=True)
class ThroughputParams:
    """The seven parameters, in seconds (gamma has no unit and lies in [1, 10])."""

    alpha_c: float
    beta_c: float
    alpha_n: float
    beta_n: float
    alpha_r: float
    beta_r: float
    gamma: float

    def __post_init__(self) -> None:
        values = np.array(astuple(self), dtype=float)
        if not np.isfinite(values).all() or (values < 0).any():
            raise ValueError(f"throughput parameters are {astuple(self)}; all must be finite and at least 0")
        if not 1.0 <= self.gamma <= 10.0:
            raise ValueError(f"gamma is {self.gamma}; it must lie in [1, 10]")

    def slower(self, factor: float) -> ThroughputParams:
        """Return the parameters of a job all of whose steps take ``factor`` times as long."""
        seconds = {field.name: factor * getattr(self, field.name) for field in fields(self) if field.name != "gamma"}
        return replace(self, **seconds)


def gradient_seconds(params: ThroughputParams, atomic_batch: ArrayLike) -> Floats:
    """T_grad: seconds of one forward and backward pass over ``atomic_batch`` examples."""
    return np.asarray(params.alpha_c + params.beta_c * np.asarray(atomic_batch, dtype=float))


def sync_seconds(params: ThroughputParams, num_nodes: ArrayLike, num_replicas: ArrayLike) -> Floats:
    """T_sync: seconds that reducing the gradients takes when nothing overlaps it."""
    nodes = np.asarray(num_nodes)
    replicas = np.asarray(num_replicas, dtype=float)
    extra = np.maximum(replicas - 2.0, 0.0)
    across = params.alpha_n + params.beta_n * extra
    within = params.alpha_r + params.beta_r * extra
    sync = np.where(nodes > 1, across, np.where(replicas > 1, within, 0.0))
    return np.maximum(sync, SMALLEST_SECONDS)


def optim_seconds(
    params: ThroughputParams, num_nodes: ArrayLike, num_replicas: ArrayLike, atomic_batch: ArrayLike
) -> Floats:
    """T_optim: seconds of the pass whose gradients are reduced and applied."""
    log_grad = np.log(np.maximum(gradient_seconds(params, atomic_batch), SMALLEST_SECONDS))
    log_sync = np.log(sync_seconds(params, num_nodes, num_replicas))
    return np.exp(np.logaddexp(params.gamma * log_grad, params.gamma * log_sync) / params.gamma)


def throughput(
    params: ThroughputParams,
    num_nodes: ArrayLike,
    num_replicas: ArrayLike,
    atomic_batch: ArrayLike,
    accumulation: ArrayLike,
) -> Floats:
    """Examples per second; arguments broadcast against each other."""
    accumulation = np.asarray(accumulation, dtype=float)
    seconds = accumulation * gradient_seconds(params, atomic_batch) + optim_seconds(
        params, num_nodes, num_replicas, atomic_batch
    )
    examples = np.asarray(num_replicas, dtype=float) * np.asarray(atomic_batch, dtype=float) * (accumulation + 1.0)
    return np.asarray(examples / seconds)
