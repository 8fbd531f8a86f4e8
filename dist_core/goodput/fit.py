"""Observations -> throughput parameters, by robust least squares in log space.

Relative errors matter (a 1 ms step and a 1 s step deserve the same care), so residuals are log(predicted / observed)
of T_grad and T_optim. They are weighted by how often each configuration was seen, bounded by Huber's loss against
outliers, and joined by weak priors that decide what the data leave open: how a reduction never seen slows with more
replicas, how much of it overlaps. The minimum is found with Levenberg-Marquardt on an analytic Jacobian over
(log alpha_c, log beta_c, log alpha_n, log beta_n, log alpha_r, log beta_r, gamma).

With A = T_grad, S = T_sync and q = S^gamma / (A^gamma + S^gamma):

    d log T_optim / d log A = 1 - q        d log T_optim / d log S = q
    d log T_optim / d gamma = (q (log S - log A) - log(1 + (S/A)^gamma) / gamma) / gamma
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass

import numpy as np
from numpy.typing import NDArray

from dist_core.goodput.observations import Observation
from dist_core.goodput.throughput import SMALLEST_SECONDS, ThroughputParams

Floats = NDArray[np.float64]

GAMMA_PRIOR_WIDTH = 4.0
"""Standard deviation of gamma about 1: overlap is believed only as far as it was seen."""
RETROGRESSION_PRIOR_WIDTH = 0.3
"""Standard deviation of beta / alpha of a reduction about 0: the n-th replica costs little until seen otherwise."""
RIDGE_WIDTH = 6.0
"""Standard deviation of each parameter about its data-driven start, in log units: keeps flat directions in place."""
HUBER_SIGMAS = 1.5
INTER_NODE_FACTOR = 1.1
"""A reduction across nodes that was never seen is taken to cost at least this much of one within a node."""
_LOG_LOWEST, _LOG_HIGHEST = np.log(SMALLEST_SECONDS), np.log(1e4)
_LOWER = np.array([_LOG_LOWEST] * 6 + [1.0])
_UPPER = np.array([_LOG_HIGHEST] * 6 + [10.0])


@dataclass(frozen=True, slots=True)
class _Problem:
    """The observations as arrays of length n, and which of the seven parameters they determine."""

    replicas_beyond_two: Floats
    atomic: Floats
    across: NDArray[np.bool_]
    within: NDArray[np.bool_]
    log_gradient: Floats
    log_optim: Floats
    weight: Floats
    free: NDArray[np.bool_]

    @classmethod
    def of(cls, observations: Sequence[Observation]) -> _Problem:
        rows = np.array([row.to_row()[:6] for row in observations], dtype=float)
        nodes, replicas, atomic, gradient, optim, count = rows.T
        across = nodes > 1
        within = ~across & (replicas > 1)
        weight = np.sqrt(count / count.mean())
        free = np.array(
            [
                np.unique(atomic).size > 1,
                True,
                across.any(),
                (replicas[across] > 2).any(),
                within.any(),
                (replicas[within] > 2).any(),
                across.any() or within.any(),
            ]
        )
        beyond = np.maximum(replicas - 2.0, 0.0)
        return cls(beyond, atomic, across, within, np.log(gradient), np.log(optim), weight, free)

    def start(self) -> Floats:
        """Return a point near the data: a relative-error line through the gradient times, medians for reductions."""
        gradient = np.exp(self.log_gradient)
        if self.free[0]:
            design = np.stack([1.0 / gradient, self.atomic / gradient], axis=1) * self.weight[:, None]
            alpha, beta = np.linalg.lstsq(design, self.weight, rcond=None)[0]
            alpha = max(alpha, 1e-2 * gradient.min())
            beta = max(beta, 1e-2 * (gradient / self.atomic).min())
        else:
            # One batch size only: half of the time is taken to be fixed cost, which invites trying a larger one.
            alpha = gradient.mean() / 2
            beta = alpha / self.atomic[0]
        fitted = alpha + beta * self.atomic
        optim = np.exp(self.log_optim)
        sync = np.maximum(optim**1.2 - fitted**1.2, (0.02 * fitted) ** 1.2) ** (1 / 1.2)
        network = [
            float(np.median(sync[mask])) if mask.any() else SMALLEST_SECONDS for mask in (self.across, self.within)
        ]
        point = [alpha, beta, network[0], 0.05 * network[0], network[1], 0.05 * network[1]]
        log_point = np.clip(np.log(np.maximum(point, SMALLEST_SECONDS)), _LOG_LOWEST, _LOG_HIGHEST)
        return np.append(log_point, 1.5)


class _Residuals:
    """Residual vector and Jacobian for a stated noise level; rows: gradient, optim, three priors, seven ridges."""

    def __init__(self, problem: _Problem, start: Floats, sigma: float) -> None:
        self.problem = problem
        self.start = start
        self.num_data = 2 * len(problem.atomic)
        self.huber = HUBER_SIGMAS * sigma
        self.gamma_scale = sigma / GAMMA_PRIOR_WIDTH
        self.ratio_scale = sigma / RETROGRESSION_PRIOR_WIDTH
        self.ridge_scale = sigma / RIDGE_WIDTH

    def __call__(self, point: Floats) -> tuple[Floats, Floats]:
        problem, n = self.problem, len(self.problem.atomic)
        alpha_c, beta_c, alpha_n, beta_n, alpha_r, beta_r = np.exp(point[:6])
        gamma = point[6]
        grad = alpha_c + beta_c * problem.atomic
        sync = np.where(
            problem.across,
            alpha_n + beta_n * problem.replicas_beyond_two,
            np.where(problem.within, alpha_r + beta_r * problem.replicas_beyond_two, SMALLEST_SECONDS),
        )
        log_grad, log_sync = np.log(grad), np.log(sync)
        gap = gamma * (log_sync - log_grad)
        soft = np.logaddexp(0.0, gap)
        share = np.exp(gap - soft)
        residual = np.empty(self.num_data + 10)
        residual[:n] = problem.weight * (log_grad - problem.log_gradient)
        residual[n : 2 * n] = problem.weight * (log_grad + soft / gamma - problem.log_optim)
        jacobian = np.zeros((len(residual), 7))
        fixed = alpha_c / grad
        jacobian[:n, 0] = problem.weight * fixed
        jacobian[:n, 1] = problem.weight * (1 - fixed)
        jacobian[n : 2 * n, 0] = problem.weight * (1 - share) * fixed
        jacobian[n : 2 * n, 1] = problem.weight * (1 - share) * (1 - fixed)
        reducing = problem.across | problem.within
        for mask, alpha, column in ((problem.across, alpha_n, 2), (problem.within, alpha_r, 4)):
            part = np.where(mask, alpha / sync, 0.0)
            jacobian[n : 2 * n, column] = problem.weight * share * part
            jacobian[n : 2 * n, column + 1] = problem.weight * share * np.where(mask, 1 - part, 0.0)
        slope = (share * (log_sync - log_grad) - soft / gamma) / gamma
        jacobian[n : 2 * n, 6] = problem.weight * slope * reducing
        prior = self.num_data
        residual[prior] = self.gamma_scale * (gamma - 1.0)
        jacobian[prior, 6] = self.gamma_scale
        for row, ratio, column in ((prior + 1, beta_n / alpha_n, 2), (prior + 2, beta_r / alpha_r, 4)):
            value = self.ratio_scale * ratio * problem.free[column + 1]
            residual[row] = value
            jacobian[row, column], jacobian[row, column + 1] = -value, value
        residual[prior + 3 :] = self.ridge_scale * (point - self.start)
        jacobian[prior + 3 :, :] = self.ridge_scale * np.eye(7)
        return residual, jacobian

    def loss(self, residual: Floats) -> float:
        """Huber on the data rows, squares on the priors."""
        size = np.abs(residual[: self.num_data])
        data = np.where(size <= self.huber, 0.5 * size**2, self.huber * (size - 0.5 * self.huber))
        return float(data.sum() + 0.5 * np.square(residual[self.num_data :]).sum())

    def robust_scale(self, residual: Floats) -> Floats:
        """Row factors of iteratively reweighted least squares."""
        scale = np.ones_like(residual)
        size = np.abs(residual[: self.num_data])
        outside = size > self.huber
        scale[: self.num_data][outside] = np.sqrt(self.huber / size[outside])
        return scale


def _minimize(
    residuals: _Residuals, point: Floats, free: NDArray[np.bool_], iterations: int, tolerance: float
) -> Floats:
    """Levenberg-Marquardt within the box; stops when a step gains less than ``tolerance`` of the loss."""
    index = np.flatnonzero(free)
    residual, jacobian = residuals(point)
    loss, damping = residuals.loss(residual), 1e-2
    for _ in range(iterations):
        scale = residuals.robust_scale(residual)
        scaled = jacobian[:, index] * scale[:, None]
        gradient = scaled.T @ (residual * scale)
        stuck = ((point[index] <= _LOWER[index]) & (gradient > 0)) | ((point[index] >= _UPPER[index]) & (gradient < 0))
        active = ~stuck
        if not active.any():
            break
        hessian = (scaled.T @ scaled)[np.ix_(active, active)]
        improved = False
        for _ in range(10):
            step = np.linalg.solve(hessian + damping * np.diag(np.diag(hessian) + 1e-9), -gradient[active])
            candidate = point.copy()
            candidate[index[active]] += step
            candidate = np.clip(candidate, _LOWER, _UPPER)
            next_residual, next_jacobian = residuals(candidate)
            next_loss = residuals.loss(next_residual)
            if next_loss < loss:
                improved = True
                break
            damping *= 4.0
        if not improved:
            break
        gained, loss = loss - next_loss, next_loss
        point, residual, jacobian = candidate, next_residual, next_jacobian
        damping = max(damping / 5.0, 1e-9)
        if gained < tolerance * (1e-9 + loss) or np.abs(step).max() < 1e-7:
            break
    return point


def fit_throughput(
    observations: Sequence[Observation], *, warm_start: ThroughputParams | None = None
) -> ThroughputParams | None:
    """Fit the model; None without observations. ``warm_start`` (an earlier fit) saves about half of the time.

    A reduction across nodes that was never seen is priced at no less than one within a node; one that was never seen
    at all is taken as free, so that a trial is let to try (Pollux, section 4.1, "prior-driven exploration").
    """
    if not observations:
        return None
    problem = _Problem.of(observations)
    start = problem.start()
    point = start
    if warm_start is not None:
        logs = np.log(np.maximum(astuple(warm_start)[:6], SMALLEST_SECONDS))
        point = np.where(problem.free, np.append(logs, warm_start.gamma), start)
    point = _minimize(_Residuals(problem, start, 0.1), point, problem.free, 8, 1e-3)
    residual, _ = _Residuals(problem, start, 0.1)(point)
    sigma = float(np.clip(1.4826 * np.median(np.abs(residual[: 2 * len(problem.atomic)])), 3e-3, 0.3))
    point = _minimize(_Residuals(problem, start, sigma), point, problem.free, 40, 1e-5)
    values = np.where(problem.free[:6], np.exp(point[:6]), 0.0)
    if not problem.free[0]:
        values[:2] = np.exp(point[:2])
    if not problem.across.any():
        values[2] = values[4] * INTER_NODE_FACTOR
        values[3] = values[5] * INTER_NODE_FACTOR
    gamma = point[6] if problem.free[6] else 1.0
    return ThroughputParams(*(float(value) for value in (*values, np.clip(gamma, 1.0, 10.0))))
