"""Value of a second of each trial's work when completion times are to be short on average.

Let V(x) be the sum of completion times when trials with remaining work x share the slots from now on, without further
arrivals, under a good rule. Then dV/dx_j is the price of trial j's work: a policy that maximises the sum of prices
times speeds takes one step of policy improvement over that rule. The rule is the one of heSRPT (Berg, Vesilo, Harchol-
Balter, Performance 2020) by rank: with the trials in order of remaining work, largest first, number i has the weight

    (i^q - (i - 1)^q)^(1 - p)        q = 1 / (1 - p)

and slots go to the largest weight times marginal speed-up; p says how well work spreads (1: perfectly). heSRPT is
optimal where all speed-ups are k^p; here each trial has its own, as the concave envelope of what its model says.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

SPREAD = 0.7
STEP = 0.1
"""Part of a trial's remaining work that is taken away to see what difference it makes."""
MOST_EXACT = 60
"""Largest number of trials whose prices are computed exactly (fluid schedule); above it heSRPT's weights are used."""


def rank_weights(remaining: Floats, spread: float = SPREAD) -> Floats:
    """Return the rule's weights along the last axis; 0 for trials without work."""
    power = 1.0 / (1.0 - spread)
    index = np.arange(remaining.shape[-1], dtype=float)
    by_rank = ((index + 1) ** power - index**power) ** (1.0 - spread)
    # Of equal ones the first weighs most: it was submitted before the others.
    last = remaining.shape[-1] - 1
    order = last - np.argsort(-remaining[..., ::-1], axis=-1, kind="stable")
    weights = np.empty_like(remaining)
    np.put_along_axis(weights, order, np.broadcast_to(by_rank, remaining.shape), axis=-1)
    return np.where(remaining > 0, weights, 0.0)


class FluidSchedule:
    """Trials with concave speed-ups that share ``total`` slots continuously."""

    def __init__(self, segments: Sequence[Sequence[tuple[float, float]]], total: float) -> None:
        """``segments``: for each trial (slots, speed gained) along its envelope, steepest first, at least one."""
        self.total = total
        self.trial = np.array([index for index, parts in enumerate(segments) for _ in parts])
        self.slots = np.array([slots for parts in segments for slots, _ in parts])
        self.gain = np.array([gain for parts in segments for _, gain in parts])
        self.slope = self.gain / self.slots
        self.num_trials = len(segments)
        self._starts = np.searchsorted(self.trial, np.arange(self.num_trials))

    def speeds(self, weights: Floats) -> Floats:
        """Return each trial's speed when slots go to the largest weight times slope.

        Weights (S, J) -> speeds (S, J).
        """
        value = weights[:, self.trial] * self.slope
        order = np.argsort(-value, axis=1, kind="stable")
        slots = self.slots[order] * (np.take_along_axis(value, order, axis=1) > 0)
        before = np.cumsum(slots, axis=1) - slots
        part = np.clip((self.total - before) / np.maximum(slots, 1e-12), 0.0, 1.0) * (slots > 0)
        got = np.zeros_like(value)
        np.put_along_axis(got, order, part * self.gain[order], axis=1)
        return np.asarray(np.add.reduceat(got, self._starts, axis=1))

    def total_completion(self, remaining: Floats, spread: float = SPREAD) -> Floats:
        """Sum of completion times under the rule, for each row of ``remaining`` (S, J); work in seconds on one slot."""
        work = remaining.copy()
        total = np.zeros(len(work))
        for _ in range(self.num_trials):
            alive = work > 1e-9
            count = alive.sum(axis=1)
            if not count.any():
                break
            speeds = self.speeds(rank_weights(np.where(alive, work, 0.0), spread))
            with np.errstate(divide="ignore", invalid="ignore"):
                ends = np.where(alive & (speeds > 0), work / speeds, np.inf)
            step = ends.min(axis=1)
            step = np.where(np.isfinite(step), step, 0.0)
            work = np.where(ends <= step[:, None] * (1 + 1e-9), 0.0, np.maximum(work - speeds * step[:, None], 0.0))
            total += step * count
        return total


def prices(
    remaining: Floats,
    segments: Callable[[], Sequence[Sequence[tuple[float, float]]]],
    total: float,
) -> Floats:
    """dV/dx for each trial: seconds of completion time saved per second of its work; see the module's text.

    ``segments`` are asked for only where a fluid schedule is made of them.
    """
    if len(remaining) < 2:
        return np.ones(len(remaining))
    if len(remaining) > MOST_EXACT:
        return rank_weights(remaining, SPREAD)
    schedule = FluidSchedule(segments(), total)
    taken = STEP * remaining
    scenarios = np.vstack([remaining, remaining - np.diag(taken)])
    value = schedule.total_completion(scenarios, SPREAD)
    return np.asarray(np.maximum((value[0] - value[1:]) / taken, 1e-3))
