"""Promise of a trial within its study, from reports at equal progress.

A trial is compared with every other one of its study at the same progress: its best value so far against the other's
best value up to that progress. The share of those it beats, with one win and one loss added (Laplace's rule, the
benefit of doubt), is its promise. A trial without a report has promise 1/2. Values that are not numbers count as worst.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from trials.record import Report


@dataclass(frozen=True, slots=True)
class Promise:
    weight: float
    """Weight in (0, 1); 1/2 means that nothing is known."""
    rank: int
    """1 is best among those that can be compared; 0 when nothing was reported."""
    compared: int
    """Number of trials compared, this one included."""

    @property
    def sentence(self) -> str:
        if self.rank == 0:
            return "nothing reported yet"
        return f"rank {self.rank} of {self.compared} at equal progress"


def best_so_far(reports: Sequence[Report], *, maximize: bool) -> list[tuple[float, float]]:
    """(progress, best value up to there), by progress; the value of a report that is not a number is ignored."""
    curve: list[tuple[float, float]] = []
    for report in sorted(reports, key=lambda report: (report.progress, report.step)):
        if report.value is None:
            continue
        best = report.value
        if curve:
            best = max(curve[-1][1], best) if maximize else min(curve[-1][1], best)
        curve.append((report.progress, best))
    return curve


class Ranking:
    """The promises of one study's trials. Curves of trials that have reported nothing new are kept."""

    def __init__(self, *, maximize: bool) -> None:
        self.maximize = maximize
        self._curves: dict[str, _Curve] = {}

    def promises(self, reports: Mapping[str, Sequence[Report]], asked: Collection[str]) -> dict[str, Promise]:
        """Return the promises of the trials asked for; ``reports`` has those of every trial, finished ones included.

        Takes time in proportion to (trials with reports) x log(reports of one) x (trials asked for), vectorised.
        """
        for trial_id in self._curves.keys() - reports.keys():
            del self._curves[trial_id]
        for trial_id, rows in reports.items():
            known = self._curves.get(trial_id)
            if known is None or known.rows != rows:
                self._curves[trial_id] = _Curve(list(rows), maximize=self.maximize)
        result = {}
        known_ones = [name for name in asked if name in self._curves and len(self._curves[name].points)]
        for trial_id in asked:
            failed = trial_id in reports and len(reports[trial_id]) > 0
            result[trial_id] = Promise(0.05 if failed else 0.5, 0, 0)
        if not known_ones:
            return result
        reached = np.array([self._curves[name].points[-1] for name in known_ones]) * (1 + 1e-9)
        values = np.array([self._curves[name].best[-1] for name in known_ones])
        wins, losses = np.zeros(len(known_ones), int), np.zeros(len(known_ones), int)
        for curve in self._curves.values():
            if not len(curve.points):
                continue
            index = np.searchsorted(curve.points, reached, side="right") - 1
            rivals = curve.best[index]
            better, worse = (values > rivals, values < rivals) if self.maximize else (values < rivals, values > rivals)
            # A trial's own curve has its own value there: it neither wins nor loses against itself.
            wins += better & (index >= 0)
            losses += worse & (index >= 0)
        for name, won, lost in zip(known_ones, wins.tolist(), losses.tolist(), strict=True):
            compared = won + lost
            result[name] = Promise((won + 1) / (compared + 2), lost + 1, compared + 1)
        return result


class _Curve:
    def __init__(self, rows: list[Report], *, maximize: bool) -> None:
        curve = best_so_far(rows, maximize=maximize)
        self.rows = rows
        self.points = np.array([point for point, _ in curve])
        self.best = np.array([value for _, value in curve])
