"""Goodput policy's table: the value of each number of slots to each trial, and which numbers it may have."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from scheduler.allocation.completion import prices
from scheduler.allocation.counts import count_grid, envelope
from scheduler.allocation.goals import BUDGET_EFFICIENCY, StudyTrials, gains
from scheduler.snapshot import LayoutOption, Snapshot, SpeedModel, TrialView

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]

MOST_SPEED_PER_SLOT = 2.0
LEAST_KEPT = 0.02
"""Least share of a speed that a change leaves, however much it costs."""
STARTS_ANEW = 0.9
"""Share of another layout's predicted speed that counts, as its trial has to start anew for it."""
LEAST_GROWTH = 0.005
"""Least share of the present speed that a growth must add: less would be shown as none."""
ONE = np.array([1], dtype=np.int64)


HORIZON_SECONDS = 200.0
"""Over how long a change is believed to last; less for a trial that ends before."""
EXPLORATION = 4.0
"""A trial may have so many times the replicas that its study was measured with (2 in Pollux, section 4.1)."""
SMALLEST_GAIN = 0.02
"""Speed, in slots, that a further slot must add: models are not believed to less, and slots have other uses."""
PROMISE_POWER = 2.0
"""Sharpens promise: a slot should not leave the best trial for the worst one's steeper speed-up."""
SETTLED_STEPS = 8
"""A trial is left alone after a rescale until it has timed so many steps at its new size, and has trained for as
long as the rescale took; after its start until it has timed any."""
MOST_SETTLE_SECONDS = 30.0
"""But not longer: its steps may be long."""
UNKNOWN_SECONDS = 60.0
"""Remaining work, in seconds, assumed for a trial that has declared no length and not run yet."""


class GoodputTable:
    """The value of each count (columns) for each trial (rows), and what it is made of."""

    def __init__(self, views: Sequence[TrialView], snapshot: Snapshot) -> None:
        self._views = views
        self._total = snapshot.total_slots
        self._node_slots = snapshot.largest_node
        self.counts = count_grid(views, self._total, self._node_slots)
        self.speeds = np.zeros((len(views), len(self.counts)))
        """Relative to one slot; linear where nothing is known."""
        self.work = np.zeros(len(views))
        """Seconds that the rest would take on one slot, as far as it is expected to be trained."""
        self._options = [view.options or (view.option(),) for view in views]
        self._chosen = np.zeros((len(views), len(self.counts)), dtype=np.int64)
        """Index of the fastest layout with each count."""
        self._before: dict[int, float] = {}
        """Speed with what it has, of trials with a choice."""
        self._possible = np.ones((len(views), len(self.counts)), dtype=bool)
        """True where any layout makes whole replicas of the count."""
        self.chosen_counts: list[int] = [0] * len(views)
        """Counts of the latest search, by trial."""
        self._left_out: dict[int, set[str]] = {}
        """Layouts for which no node has room, by row."""
        self._switches = np.zeros((len(views), len(self.counts)), dtype=bool)
        """True where the trial would have to start anew with another layout than it has."""
        self.left_alone = np.array([self._is_left_alone(view) for view in views], dtype=bool)
        """Trials that are being rescaled, or have just been."""
        self._measure(views)
        self.price = prices(self.work, lambda: self._segments(views), float(self._total))
        promise = np.array([view.promise for view in views])
        weight = np.array([view.study_weight for view in views])
        self.weights = self.price * (2.0 * promise) ** PROMISE_POWER * weight
        self.held = np.array([view.held_slots for view in views], dtype=np.int64)
        self.hurried = np.array([self._hurries(row, view) for row, view in enumerate(views)], dtype=bool)
        """Trials of studies that do not wait for all of theirs to start before the best may grow."""
        self.gains: Floats
        """Values without the precedence of minimums."""
        self.values = self._values(views)

    def _measure(self, views: Sequence[TrialView]) -> None:
        for row, view in enumerate(views):
            if view.model is None:
                self.speeds[row] = self.counts / max(1, view.min_slots)
                self.work[row] = UNKNOWN_SECONDS
                continue
            positive = self.counts[1:]
            curves = np.array(
                [
                    np.zeros(len(positive)) if each.model is None else each.model.curve(self._node_slots, positive)
                    for each in self._options[row]
                ]
            )
            # Where memory leaves no layout for one slot, the unit is what a slot's part of one is worth.
            alone = float(curves[:, 0].max())
            left = view.remaining_progress
            if left is None:
                # Nothing declared: as much again as it has had (Lindy).
                left = max(view.progress, UNKNOWN_SECONDS * alone)
            self.work[row] = max(view.expected_part * left, 1e-6) / alone
            # No model is believed that promises more than twice the slots' worth.
            speeds = np.minimum(curves / alone, MOST_SPEED_PER_SLOT * positive)
            self.speeds[row, 1:] = self._with_best_layouts(row, view, speeds)

    def _with_best_layouts(self, row: int, view: TrialView, speeds: Floats) -> Floats:
        """Return each count's speed with its best layout; a layout that the trial does not have costs a start.

        ``speeds``: layouts x counts.
        """
        options, counts = self._options[row], self.counts[1:]
        stays = np.array([not view.held_slots or each.layout == view.layout for each in options])
        if len(options) == 1:
            self._switches[row, 1:] = not stays[0]
            return np.asarray(speeds[0])
        possible = np.array(
            [
                (counts % each.slots_per_replica == 0) & (counts >= each.min_slots) & (counts <= each.max_slots)
                for each in options
            ]
        )
        if self.left_alone[row]:
            possible &= stays[:, None]
        left_out = self._left_out.get(row, set())
        possible &= np.array([each.layout not in left_out for each in options])[:, None]
        worth = speeds * np.where(
            stays[:, None], 1.0, np.minimum(STARTS_ANEW, self._kept_of_a_start(row, view, speeds))
        )
        any_possible = possible.any(axis=0)
        chosen = np.where(any_possible, np.where(possible, worth, -np.inf).argmax(axis=0), stays.argmax())
        self._chosen[row, 1:], self._possible[row, 1:] = chosen, any_possible
        self._switches[row, 1:] = ~stays[chosen]
        if view.held_slots and stays.any():
            at = min(int(np.searchsorted(counts, view.held_slots)), len(counts) - 1)
            self._before[row] = float(speeds[stays.argmax(), at])
        return np.asarray(speeds[chosen, np.arange(len(counts))])

    def _kept_of_a_start(self, row: int, view: TrialView, speeds: Floats) -> Floats:
        """Return the share of a speed that is left after a start with another layout."""
        cost = view.pause_seconds + view.start_seconds
        use = np.minimum(HORIZON_SECONDS, self.work[row] / np.maximum(speeds, 1e-12) + view.pause_seconds)
        return np.asarray(np.maximum(1.0 - cost / np.maximum(use, 1e-9), LEAST_KEPT))

    def leave_out(self, rows: Sequence[int]) -> bool:
        """Leave out layouts chosen for these trials that found no place; tell whether any trial has another."""
        for row in rows:
            self._left_out.setdefault(row, set()).add(self.option(row, self.chosen_counts[row]).layout)
        if any(len(self._left_out[row]) < len(self._options[row]) for row in rows):
            self._measure(self._views)
            self.values = self._values(self._views)
            return True
        return False

    def option(self, row: int, count: int) -> LayoutOption:
        """Return the layout with which the trial trains best on that many slots."""
        column = int(np.searchsorted(self.counts, count))
        return self._options[row][int(self._chosen[row, column])]

    def _hurries(self, row: int, view: TrialView) -> bool:
        """Tell whether it searches the best result, or a start now would come too late for its deadline."""
        if view.goal != "deadline" or view.deadline_in is None:
            return view.goal == "time_to_best"
        whole = self.work[row] / max(view.expected_part, 1e-6)
        return bool(whole / max(float(self.speeds[row].max()), 1e-12) > view.deadline_in)

    def _segments(self, views: Sequence[TrialView]) -> list[list[tuple[float, float]]]:
        """(slots, speed gained) along each trial's concave envelope, as far as it may grow."""
        counts, segments = self.counts.tolist(), []
        for row, view in enumerate(views):
            reach = int(np.searchsorted(self.counts, min(view.max_slots, self._total), side="right"))
            speeds = self.speeds[row, :reach].tolist()
            parts = envelope(counts, speeds, 0, row) if reach > 1 else []
            segments.append(
                [
                    (float(counts[after] - counts[before]), speeds[after] - speeds[before])
                    for _, _, before, after in parts
                ]
                or [(1.0, 1.0)]
            )
        return segments

    def learn_spread(self, spread: Mapping[int, tuple[int, int]]) -> bool:
        """(slots that one node has for it, nodes that more would need) of trials by row; whether that is news."""
        news = False
        for row, (on_one_node, nodes) in spread.items():
            view = self._views[row]
            assert view.model is not None
            more = self.counts > on_one_node
            now = view.model.curve(self._node_slots, ONE)[0]
            there = [
                view.model.curve(-(-int(count) // nodes), np.array([count]))[0] / now for count in self.counts[more]
            ]
            speeds = np.minimum(self.speeds[row, more], there)
            news = news or bool((speeds < self.speeds[row, more]).any())
            self.speeds[row, more] = speeds
        if news:
            self.values = self._values(self._views)
        return news

    def speed(self, row: int, count: float) -> float:
        return float(np.interp(count, self.counts, self.speeds[row]))

    def speed_before(self, row: int, view: TrialView) -> float:
        """Return the trial's predicted speed with its present slots and layout."""
        return self._before.get(row, self.speed(row, view.held_slots))

    def numbers(self, row: int, view: TrialView, count: int) -> dict[str, float]:
        """Return the numbers that decided about a trial with ``count`` slots."""
        speed, more = self.speed(row, count), self.speed(row, count + 1)
        return {
            "expected remaining seconds on one slot": float(self.work[row]),
            "price of its work": float(self.price[row]),
            "promise": view.promise,
            "probability of training to the end": view.goes_on,
            "study weight": view.study_weight,
            "weight": float(self.weights[row]),
            "speed on its slots, in slots": speed,
            "value of one more slot": float(self.weights[row] * (more - speed)),
            "rescale pause, seconds": view.pause_seconds,
            "start time of a replica, seconds": view.start_seconds,
        }

    def without_growth(self) -> Floats:
        """Return the values where those that run get no more than they have."""
        grows = (self.counts[None, :] > self.held[:, None]) & (self.held[:, None] > 0) & ~self.hurried[:, None]
        return np.where(grows, -np.inf, self.values)

    def _gains(self, views: Sequence[TrialView], kept: Floats) -> Floats:
        """Return each change's value by the study's goal; a further slot has to add a little at least."""
        least_gain = np.full(len(views), SMALLEST_GAIN)
        speeds = self.speeds * kept
        worths = self.weights[:, None] * speeds
        studies: dict[str, list[int]] = {}
        for row, view in enumerate(views):
            if view.goal == "budget":
                least_gain[row] = BUDGET_EFFICIENCY
            if view.goal not in ("completion_time", "budget"):
                studies.setdefault(view.study, []).append(row)
        fair = self._total / max(1, len(views))
        for rows in studies.values():
            trials = StudyTrials(
                views=[views[row] for row in rows],
                speeds=speeds[rows],
                work=self.work[rows],
                price=self.weights[rows],
                fair_speed=np.array([self.speed(row, fair) for row in rows]),
            )
            worths[rows] = gains(views[rows[0]].goal, trials)
        one = (worths / np.maximum(kept, 1e-9))[:, 1] if worths.shape[1] > 1 else np.zeros(len(views))
        return np.asarray(worths - (least_gain * one)[:, None] * self.counts[None, :] * kept)

    def _values(self, views: Sequence[TrialView]) -> Floats:
        if not views:
            return np.zeros((0, len(self.counts)))
        counts, held = self.counts[None, :], self.held[:, None]
        pause = np.array([view.pause_seconds for view in views])[:, None]
        start = np.array([view.start_seconds for view in views])[:, None]
        least = np.array([max(1, view.min_slots) for view in views])[:, None]
        speeds = np.maximum(self.speeds, 1e-12)
        # A node that has become smaller may leave a trial with more than there is.
        at_present = np.minimum(np.searchsorted(self.counts, self.held), len(self.counts) - 1)
        present = self.speeds[np.arange(len(views)), at_present][:, None]
        # A change costs its pause, and until a new replica trains its slots earn nothing.
        cost = pause + start * np.where(counts > held, np.maximum(1.0 - present / speeds, 0.0), 0.0)
        cost = np.where(self._switches, pause + start, cost)
        use = np.minimum(HORIZON_SECONDS, self.work[:, None] / speeds + pause)
        kept = np.maximum(1.0 - cost / np.maximum(use, 1e-9), LEAST_KEPT)
        values = self.gains = self._gains(views, np.where((counts == held) & ~self._switches, 1.0, kept))
        everybody = float(values.max(initial=1.0)) * len(views)
        # Minimums come before everything else, and those of trials that run before those of others.
        first = np.where(held > 0, 2.0, np.where(self.hurried[:, None], 0.0, 1.0))
        values = values + np.where(counts >= least, everybody * first, 0.0)
        values[:, 0] = 0.0
        values[~self._allowed(views)] = -np.inf
        values[(counts > held) & (held >= least) & ~self._pays(present, pause, start)] = -np.inf
        return np.asarray(values)

    def _pays(self, present: Floats, pause: Floats, start: Floats) -> NDArray[np.bool_]:
        """Tell whether a running trial ends sooner with each count: it trains while replicas start, and then pauses.

        ``present``, ``pause`` and ``start``: by trial (J, 1).
        """
        work, present = self.work[:, None], np.maximum(present, 1e-12)
        left = np.maximum(work - present * start, 0.0)
        faster = self.speeds > present * (1.0 + LEAST_GROWTH)
        return np.asarray(faster & (start + pause + left / np.maximum(self.speeds, 1e-12) < work / present))

    def _is_left_alone(self, view: TrialView) -> bool:
        since = view.since_rescale_seconds
        settled = since >= MOST_SETTLE_SECONDS or (
            view.steps_measured >= SETTLED_STEPS and since >= view.pause_seconds + view.start_seconds
        )
        if not view.num_rescales:
            # No change has to pay first, or to prove what was believed of it: any measurement will do.
            settled = view.steps_measured > 0 or settled
        if view.options and all(each.layout != view.layout for each in view.options):
            # What it has does not do.
            return False
        return bool(view.held_slots) and not (view.can_rescale and settled)

    def _allowed(self, views: Sequence[TrialView]) -> NDArray[np.bool_]:
        """Return which counts each trial may be given now."""
        waiting = bool(((self.held == 0) & ~self.hurried).any())
        least, most, frozen = (np.zeros(len(views), dtype=np.int64) for _ in range(3))
        for row, view in enumerate(views):
            held = view.held_slots
            least[row] = view.min_slots
            if view.model is None:
                most[row] = max(view.min_slots, held)
            else:
                models = [each.model for each in self._options[row] if each.model is not None]
                seen = max(1, *(each.most_profiled for each in models))
                useful = max(each.most_useful for each in models)
                reach = min(EXPLORATION * seen, useful)
                most[row] = min(view.max_slots, int(max(reach, view.min_slots, held)))
            if self.left_alone[row]:
                most[row] = min(most[row], held)
                frozen[row] = not waiting and view.min_slots <= held <= view.max_slots
        counts, held_slots = self.counts[None, :], self.held[:, None]
        same = (counts == held_slots) & (held_slots >= least[:, None]) & (held_slots > 0)
        sizes = np.array([1 if len(each) > 1 else each[0].slots_per_replica for each in self._options], dtype=np.int64)[
            :, None
        ]
        within = (counts == 0) | ((counts >= least[:, None]) & (counts <= most[:, None]))
        return np.asarray(np.where(frozen[:, None] > 0, same, within | same) & (counts % sizes == 0) & self._possible)


def is_rooted(view: TrialView) -> bool:
    """Elsewhere it would have to wait for new replicas; where it is, for a pause alone."""
    return view.start_seconds > view.pause_seconds


def is_usable(model: SpeedModel | None, node_slots: int) -> bool:
    """Tell whether the model covers a single slot; one that does not is as good as none."""
    if model is None:
        return False
    alone = float(model.curve(node_slots, ONE)[0])
    return math.isfinite(alone) and alone > 0.0
