"""The choice of a population's parameters by a model: a Gaussian process over hyperparameters and time.

The method is PB2: Parker-Holder et al., "Provably Efficient Online Hyperparameter Optimization with Population-Based
Bandits", NeurIPS 2020 (section 3 and algorithm 2). The model predicts what a stretch gains, from its parameters, the
score that it began with, and the time; older stretches count less (Bogunovic et al., "Time-Varying Gaussian Process
Bandit Optimization", AISTATS 2016, equation 2). The parameters of the largest upper confidence bound are taken, where
stretches that are under way narrow the bound without a gain (Desautels et al., JMLR 2014).

Optuna's own GP sampler does not serve: it knows no time, and needs torch in the driver.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray
from optuna.distributions import BaseDistribution, FloatDistribution, IntDistribution

LEAST_STRETCHES = 4
"""Before so many have ended, parameters are perturbed."""
MOST_STRETCHES = 200
"""Latest ones that the model is fitted to: a fit takes time that grows with their cube."""
CANDIDATES = 1000
ROUNDS = 3
"""Rounds of candidates: the first over the whole space, each further one nearer to the best so far."""
BOUND_SCALE, BOUND_GROWTH = 0.2, 0.4
"""The confidence bound is sqrt(0.2 log(0.4 n)), with the constants of the authors' experiments."""
Numbers = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Stretch:
    parameters: Mapping[str, Any]
    time: int
    """Its number, counted from the beginning of the training that it belongs to."""
    before: float
    """Score that it began with, larger is better."""
    gain: float = 0.0


@dataclass(slots=True)
class Bandit:
    """Model of what stretches gain. Pure but for what it is told; ``random`` is numpy's generator."""

    stretches: list[Stretch] = field(default_factory=list)

    def note(self, stretch: Stretch) -> None:
        self.stretches.append(stretch)

    def propose(
        self,
        spaces: Mapping[str, BaseDistribution],
        begins: Stretch,
        under_way: Sequence[Stretch],
        random: np.random.Generator,
    ) -> dict[str, Any]:
        """Return the numeric parameters to train on with; empty while too little is known.

        Args:
            spaces: the parameters' spaces; those of categories are left out.
            begins: the stretch to choose parameters for: its time and the score that it begins with.
            under_way: stretches whose gain is not known yet.
            random: draws candidates.
        """
        names = [name for name, space in spaces.items() if isinstance(space, FloatDistribution | IntDistribution)]
        stretches = [
            each for each in self.stretches[-MOST_STRETCHES:] if all(name in each.parameters for name in names)
        ]
        if not names or len(stretches) < LEAST_STRETCHES:
            return {}
        under_way = [each for each in under_way if all(name in each.parameters for name in names)]
        gains = np.array([each.gain for each in stretches])
        scores = np.array([each.before for each in stretches])
        process = _Process.fitted(
            self._inputs(stretches, names, spaces, scores), (gains - gains.mean()) / (gains.std() or 1.0)
        )
        context = (begins.before - scores.mean()) / (scores.std() or 1.0)
        waiting = self._inputs(under_way, names, spaces, scores)
        bound = math.sqrt(max(0.0, BOUND_SCALE * math.log(max(1.0, BOUND_GROWTH * (len(stretches) + len(under_way))))))
        best, spread = random.random(len(names)), 1.0
        for _ in range(ROUNDS):
            drawn = best + spread * (random.random((CANDIDATES, len(names))) - 0.5) * 2.0
            points = np.clip(np.vstack([best, drawn]), 0.0, 1.0)
            asked = np.column_stack([points, np.full(len(points), context), np.full(len(points), float(begins.time))])
            mean, deviation = process.predicted(asked, waiting)
            best = points[int(np.argmax(mean + bound * deviation))]
            spread *= 0.2
        return {name: _from_unit(part, spaces[name]) for name, part in zip(names, best, strict=True)}

    @staticmethod
    def _inputs(
        stretches: Sequence[Stretch], names: Sequence[str], spaces: Mapping[str, BaseDistribution], scores: Numbers
    ) -> Numbers:
        """Return a row for each: its parameters within 0 and 1, the score that it began with, and its time."""
        rows = [
            [
                *(_to_unit(each.parameters[name], spaces[name]) for name in names),
                (each.before - scores.mean()) / (scores.std() or 1.0),
                float(each.time),
            ]
            for each in stretches
        ]
        return np.array(rows, dtype=float).reshape(len(rows), len(names) + 2)


@dataclass(frozen=True, slots=True)
class _Process:
    """A Gaussian process; the last column of its inputs is the time."""

    inputs: Numbers
    gains: Numbers
    variance: float
    length: float
    forgets: float
    """Share of the correlation that two time steps take away."""
    noise: float

    @classmethod
    def fitted(cls, inputs: Numbers, gains: Numbers) -> _Process:
        """Fit by the likelihood of what was gained (Rasmussen and Williams, 2006, equation 5.8)."""
        from scipy.optimize import minimize

        def made(logs: Numbers) -> _Process:
            variance, length, forgets, noise = np.exp(logs)
            return cls(inputs, gains, float(variance), float(length), float(forgets), float(noise))

        bounds = [(-3.0, 3.0), (-2.5, 2.0), (-7.0, -0.1), (-6.0, 1.0)]
        start = np.array([0.0, -0.7, -3.0, -2.0])
        fit = minimize(lambda logs: made(logs).loss, start, method="L-BFGS-B", bounds=bounds, options={"maxiter": 20})
        return made(fit.x)

    def covariance(self, one: Numbers, other: Numbers) -> Numbers:
        apart = ((one[:, None, :-1] - other[None, :, :-1]) ** 2).sum(axis=2)
        steps = np.abs(one[:, None, -1] - other[None, :, -1])
        smooth = np.exp(-apart / (2.0 * self.length**2))
        return np.asarray(self.variance * smooth * (1.0 - self.forgets) ** (steps / 2.0))

    @property
    def loss(self) -> float:
        """Return the negative log likelihood, with a weak belief in small noise and little forgetting."""
        lower = self._root(self.inputs)
        half = _solved(lower, self.gains)
        return float(0.5 * half @ half + np.log(np.diag(lower)).sum() + 0.05 * (self.noise + self.forgets))

    def predicted(self, asked: Numbers, waiting: Numbers) -> tuple[Numbers, Numbers]:
        """Return means and standard deviations; ``waiting``: inputs whose gains are not known yet."""
        lower = self._root(self.inputs)
        across = _solved(lower, self.covariance(self.inputs, asked))
        mean = across.T @ _solved(lower, self.gains)
        inputs = np.vstack([self.inputs, waiting])
        across = _solved(self._root(inputs), self.covariance(inputs, asked))
        return mean, np.sqrt(np.maximum(self.variance - (across**2).sum(axis=0), 1e-12))

    def _root(self, inputs: Numbers) -> Numbers:
        own = self.covariance(inputs, inputs) + (self.noise + 1e-6) * np.eye(len(inputs))
        return np.asarray(np.linalg.cholesky(own))


def _solved(lower: Numbers, right: Numbers) -> Numbers:
    from scipy.linalg import solve_triangular

    return np.asarray(solve_triangular(lower, right, lower=True, check_finite=False))


def _to_unit(value: Any, space: BaseDistribution) -> float:
    assert isinstance(space, FloatDistribution | IntDistribution)
    low, high, at = (_scaled(each, space) for each in (space.low, space.high, value))
    return 0.5 if high == low else (at - low) / (high - low)


def _from_unit(part: float, space: BaseDistribution) -> float | int:
    assert isinstance(space, FloatDistribution | IntDistribution)
    low, high = _scaled(space.low, space), _scaled(space.high, space)
    value = low + float(part) * (high - low)
    value = math.exp(value) if space.log else value
    if space.step is not None:
        value = space.low + round((value - space.low) / space.step) * space.step
    value = max(space.low, min(space.high, value))
    return int(value) if isinstance(space, IntDistribution) else float(value)


def _scaled(value: float, space: FloatDistribution | IntDistribution) -> float:
    return math.log(value) if space.log else float(value)
