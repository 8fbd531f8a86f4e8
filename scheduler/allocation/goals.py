"""Values of slots to the trials of one study, by what its owner wants of it.

For each goal the value of a trial's speed s (in slots), up to a factor that the study shares. Work is what the rest
of a trial is expected to take on one slot.

    completion_time   c_j s             c_j: price of its work, times promise (``allocation.completion``)
    time_to_best      P_j s / work_j    P_j: chance to be the study's best trial: the best one ends soon where the sum
                      + work_j s        is largest (Smith's rule by chance), and long ones must not be left to the end
    makespan          work_j s          the trial that will end last is helped first
    fairness          -s_fair / s       harmonic mean of shares (Pollux, OSDI'21, with p = -1)
    deadline          P_j min(s, s_d)   s_d: the speed that ends the trial in time; what comes later is worth nothing
    budget            c_j s             where a further slot brings nearly what it costs

Every goal's values are scaled so that a study as a whole weighs what its trials' prices say: a goal moves slots within
a study, not between studies.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from scheduler.knowledge.survival import rank_correlation
from scheduler.snapshot import TrialView
from trials.terms import Goal

Floats = NDArray[np.float64]

_NORMAL = NormalDist()
SMALLEST_SHARE = 0.25
"""Keeps the harmonic mean finite for a trial that gets nothing."""
BUDGET_EFFICIENCY = 0.9
"""Least share of a slot's speed that a further slot must add under the goal ``budget``."""


@dataclass(frozen=True, slots=True)
class StudyTrials:
    """The trials of one study, as arrays over them (J,) or by number of slots (J, C)."""

    views: Sequence[TrialView]
    speeds: Floats
    """Speeds in slots, by count."""
    work: Floats
    price: Floats
    fair_speed: Floats
    """Speed with an equal share of the slots."""


COMPETITORS = 20
"""A trial is promising when it may end as the first of so many: the sharper, the more a lucky start counts."""


def chance_to_be_best(view: TrialView, competitors: int) -> float:
    """Return the chance that the trial ends first among so many, from its rank and how much of its length is done.

    Ranks now and at the end are jointly normal as in ``scheduler.knowledge.survival``.
    """
    first = 1.0 / max(2, competitors)
    done = _fraction(view)
    if done <= 0.0:
        return first
    correlation = rank_correlation(done)
    quantile = min(max(view.promise, 1e-3), 1.0 - 1e-3)
    score = correlation * _NORMAL.inv_cdf(quantile) + _NORMAL.inv_cdf(first)
    return float(_NORMAL.cdf(score / math.sqrt(1.0 - correlation**2)))


def _fraction(view: TrialView) -> float:
    if view.remaining_progress is None or view.progress <= 0.0:
        return 0.0
    return view.progress / (view.progress + view.remaining_progress)


def gains(goal: Goal, trials: StudyTrials) -> Floats:
    """Value of each number of slots for each trial (J, C); 0 for none."""
    speeds = trials.speeds
    if goal in ("completion_time", "budget"):
        return trials.price[:, None] * speeds
    if goal == "fairness":
        shares = speeds / np.maximum(trials.fair_speed, 1e-9)[:, None]
        worths = 1.0 / SMALLEST_SHARE - 1.0 / (shares + SMALLEST_SHARE)
    elif goal == "makespan":
        worths = trials.work[:, None] * speeds
    else:
        best = np.array([chance_to_be_best(view, COMPETITORS) for view in trials.views])
        if goal == "time_to_best":
            index = best / trials.work
            late = trials.work / trials.work.max()
            worths = (index / index.max() + late)[:, None] * speeds
        else:
            left = np.array([max(view.deadline_in or 0.0, 1.0) for view in trials.views])
            worths = best[:, None] * np.minimum(speeds, (trials.work / left)[:, None])
    return _scaled(worths, trials)


def _scaled(values: Floats, trials: StudyTrials) -> Floats:
    """Scale so that the study's trials together are worth, with one slot each, what their prices say."""
    one = trials.speeds[:, 1] if trials.speeds.shape[1] > 1 else np.ones(len(values))
    total = float(values[:, 1].sum()) if values.shape[1] > 1 else 0.0
    return values * float((trials.price * one).sum()) / total if total > 0 else values
