"""Chance that a trial is trained to its end: from which of its study's trials were stopped, where, and its rank.

The share of trials that go beyond a part of their length comes from the study's own history by the product-limit
estimator (Kaplan and Meier, JASA 1958): those that still train count as long as they were watched. Which of them go
on is a matter of rank. Rank now and rank at the end are taken as jointly normal after a transform to normal scores
(a Gaussian copula), with a correlation that grows along the curve; so the chance to end in the best share q is

    P = Phi((rho z(u) - z(1 - q)) / sqrt(1 - rho^2))        rho(f) = 1 - 0.05 f^-0.42

with u the trial's quantile among those seen at equal progress and f the part of its length that is done. The curve
rho(f) follows the rank correlations 0.74, 0.84, 0.91 and 0.98 after 1, 3, 9 and 27 of 50 epochs of the learning curves
that FT-PFN was trained on (Rakotoarison et al., ICML'24).
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

_NORMAL = NormalDist()
LARGEST_CORRELATION = 0.98


@dataclass(frozen=True, slots=True)
class Survival:
    """Survival of one study's trials."""

    stopped_at: tuple[float, ...]
    """Parts of the declared length at which trials were stopped, ascending."""
    share_beyond: tuple[float, ...]
    """Share of all trials that go on beyond each of them."""

    @classmethod
    def of(cls, stopped: Sequence[float], watched: Sequence[float]) -> Survival:
        """Estimate the survival function from trials that were stopped and trials that were not.

        ``stopped``: where trials were stopped; ``watched``: how far the others came (1: to the end).
        """
        share, points, shares = 1.0, [], []
        ends = sorted(stopped)
        everybody = sorted([*stopped, *watched])
        for point in sorted(set(ends)):
            at_risk = len(everybody) - bisect_left(everybody, point)
            # One imaginary trial that went on: the first stop of a study does not mean that all will be.
            share *= 1.0 - ends.count(point) / (at_risk + 1.0)
            points.append(point)
            shares.append(share)
        return cls(tuple(points), tuple(shares))

    def _beyond(self, fraction: float) -> float:
        index = bisect_left(self.stopped_at, fraction + 1e-9)
        return 1.0 if index == 0 else self.share_beyond[index - 1]

    def share_to_the_end(self, fraction: float) -> float:
        """Share of the trials that came beyond ``fraction`` which go on to the end."""
        return (self.share_beyond[-1] / self._beyond(fraction)) if self.share_beyond else 1.0

    def part_until_stopped(self, fraction: float) -> float:
        """Return the part of what remains after ``fraction`` that a trial does which will be stopped."""
        later = [point for point in self.stopped_at if point > fraction]
        typical = sum(later) / len(later) if later else (1.0 + fraction) / 2.0
        return (typical - fraction) / max(1.0 - fraction, 1e-9)

    def probability(self, fraction: float, quantile: float | None) -> float:
        """Return the chance that a trial at ``fraction`` of its length, at that quantile, is trained to its end."""
        share = self.share_to_the_end(fraction)
        if quantile is None or share >= 1.0 or share <= 0.0:
            return share
        correlation = rank_correlation(fraction)
        score = correlation * _NORMAL.inv_cdf(quantile) - _NORMAL.inv_cdf(1.0 - share)
        return float(_NORMAL.cdf(score / math.sqrt(1.0 - correlation**2)))


def rank_correlation(fraction: float) -> float:
    """Return the rank correlation between this part of the length and the end."""
    return float(min(LARGEST_CORRELATION, max(0.0, 1.0 - 0.05 * max(fraction, 1e-3) ** -0.42)))
