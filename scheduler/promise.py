"""How promising a trial looks within its study, from reports at equal progress.

A trial is compared with every other one of its study at the same progress: its best value so far against the other's
best value up to that progress. The share of those it beats, with one win and one loss added (Laplace's rule, the
benefit of doubt), is its promise. A trial without a report has promise 1/2. Values that are not numbers count as worst.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from trials.record import Report


@dataclass(frozen=True, slots=True)
class Promise:
    weight: float
    """In (0, 1); 1/2 means that nothing is known."""
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


def promises(reports: Mapping[str, Sequence[Report]], *, maximize: bool) -> dict[str, Promise]:
    """Promise of each trial of one study; ``reports`` has an entry for every trial, finished ones included."""
    curves = {trial: best_so_far(rows, maximize=maximize) for trial, rows in reports.items()}
    result: dict[str, Promise] = {}
    for trial, curve in curves.items():
        if not curve:
            failed = bool(reports[trial])
            result[trial] = Promise(0.05 if failed else 0.5, 0, 0)
            continue
        progress, value = curve[-1]
        wins = losses = 0
        for other, other_curve in curves.items():
            if other == trial:
                continue
            index = bisect_right([point for point, _ in other_curve], progress * (1 + 1e-9)) - 1
            if index < 0:
                continue
            rival = other_curve[index][1]
            better = value > rival if maximize else value < rival
            wins += better
            losses += not better and rival != value
        compared = wins + losses
        result[trial] = Promise((wins + 1) / (compared + 2), losses + 1, compared + 1)
    return result
