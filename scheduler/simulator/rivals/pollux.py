"""Pollux (Qiao et al., OSDI'21, section 4.2): the power mean of the trials' speed-ups, with a penalty for restarts.

A trial's speed-up is its goodput relative to that with its fair share of the slots. The objective is their harmonic
mean (p = -1, the paper's choice); a trial whose allocation changes counts with the part of its age that restarts have
left it. For counts that are packed onto nodes this is a sum over trials, so the optimum is found exactly by dynamic
programming (``pollux``).

``pollux_search`` is the search of the paper, for comparison: allocation matrices (trials x nodes) by a genetic
algorithm (section 4.2.1). A population of matrices, the present one and variations of it, is varied by crossover of
rows and by random entries; what exceeds a node is taken away, no two distributed trials share a node, and the fitter
half of parents and children survives. Random numbers come from a seed of its own: one snapshot has one answer.
"""

from __future__ import annotations

import math
from typing import Final

import numpy as np
from numpy.typing import NDArray

from scheduler.allocation.counts import choose_counts, count_grid
from scheduler.allocation.grants import grants_for
from scheduler.allocation.placement import held_by, packed
from scheduler.snapshot import Grant, Snapshot, TrialView

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]
EXPLORATION = 2
"""A trial may have twice as many replicas as it was measured with (section 4.1)."""
SMALLEST_SHARE = 1e-3
"""Keeps the harmonic mean finite for a trial that gets nothing."""
POPULATION = 100
GENERATIONS = 100
SEED = 20210714
MUTATED_ROWS = 2.0
"""Trials whose allocation a child changes at random, on average."""


class PolluxPolicy:
    name: Final = "pollux"

    def allocate(self, snapshot: Snapshot) -> dict[str, Grant]:
        eligible = snapshot.eligible
        counts, values = _objective(eligible, snapshot)
        chosen = counts[choose_counts(counts, values, snapshot.total_slots)]
        wanted = {view.trial_id: int(count) for view, count in zip(eligible, chosen, strict=True)}
        placed = packed(wanted, snapshot.nodes, held_by(eligible))
        return grants_for(snapshot, placed, code="power_mean", why="this maximizes the harmonic mean of all speed-ups")


def _objective(views: list[TrialView], snapshot: Snapshot) -> tuple[Integers, Floats]:
    """Return the counts of slots to choose from, and what each is worth to each trial (trials x counts)."""
    counts = count_grid(views, snapshot.total_slots, snapshot.largest_node)
    fair = max(1, math.ceil(snapshot.total_slots / max(1, len(views))))
    values = np.array([harmonic_values(view, counts, fair, snapshot.largest_node, snapshot) for view in views])
    return counts, values.reshape(len(views), len(counts))


def largest_count(view: TrialView) -> int:
    """Return the most slots it may hold: a trial that cannot be resized now keeps what it has."""
    return view.max_slots if view.can_rescale else max(view.max_slots, view.held_slots)


def harmonic_values(view: TrialView, counts: Integers, fair: int, node_slots: int, snapshot: Snapshot) -> Floats:
    """Minus the inverse of what each count is worth to the trial; -inf for counts that it may not have now.

    fair: slots of a fair share; the sum over trials is largest where the harmonic mean of their shares is.
    """
    held = view.held_slots
    per_slot = len(snapshot.nodes) / max(1, snapshot.total_slots)
    most = largest_count(view)
    if view.model is None:
        most = min(most, max(view.min_slots, held))
        speed = counts.astype(float)
        fair_speed = float(fair)
    else:
        most = min(most, max(EXPLORATION * view.model.most_profiled, view.min_slots, held))
        speed = np.concatenate([[0.0], view.model.curve(node_slots, counts[1:])])
        fair_speed = float(np.interp(min(fair, most), counts, speed))
    age = snapshot.now - view.submitted_at
    factor = max(age - view.num_rescales * view.pause_seconds, 0.0) / (age + view.pause_seconds + 1e-9)
    share = speed / fair_speed * per_slot * np.where((counts == held) | (held == 0), 1.0, factor)
    values = -1.0 / (share + SMALLEST_SHARE)
    allowed = (counts == 0) | ((counts >= view.min_slots) & (counts <= most))
    if held and not view.can_rescale:
        allowed = (counts == 0) | (counts == held)
    return np.where(allowed, values, -np.inf)


class PolluxSearchPolicy:
    name: Final = "pollux_search"

    def allocate(self, snapshot: Snapshot) -> dict[str, Grant]:
        eligible, nodes = snapshot.eligible, snapshot.nodes
        placed: dict[str, dict[str, int]] = {}
        if eligible and nodes:
            best = self._search(snapshot, eligible)
            for view, row in zip(eligible, best, strict=True):
                placed[view.trial_id] = {node.name: int(count) for node, count in zip(nodes, row, strict=True) if count}
        return grants_for(snapshot, placed, code="power_mean", why="the best that a genetic search has found")

    def _search(self, snapshot: Snapshot, views: list[TrialView]) -> Integers:
        chance = np.random.default_rng(SEED)
        problem = _Problem(snapshot, views)
        shape = (POPULATION, len(views), len(snapshot.nodes))
        present = np.broadcast_to(problem.present_if_possible(), shape)
        population = problem.repaired(_mutated(present, problem.room, chance), chance)
        population[0] = present[0]
        fitness = problem.fitness(population)
        for _ in range(GENERATIONS):
            children = problem.repaired(_varied(population, fitness, problem.room, chance), chance)
            everybody = np.concatenate([population, children])
            everyone = np.concatenate([fitness, problem.fitness(children)])
            fittest = np.argsort(-everyone, kind="stable")[:POPULATION]
            population, fitness = everybody[fittest], everyone[fittest]
        return np.asarray(population[0])


def _varied(population: Integers, fitness: Floats, room: Integers, chance: np.random.Generator) -> Integers:
    """Children of parents chosen by tournament: rows of either parent, some entries at random."""
    size, trials, _ = population.shape
    rivals = chance.integers(0, size, (2, 2, size))
    parents = np.where(fitness[rivals[:, 0]] >= fitness[rivals[:, 1]], rivals[:, 0], rivals[:, 1])
    rows = chance.random((size, trials, 1)) < 0.5
    return _mutated(np.where(rows, population[parents[0]], population[parents[1]]), room, chance)


def _mutated(matrices: Integers, room: Integers, chance: np.random.Generator) -> Integers:
    """Change some trials' rows at random: anew, or in some places."""
    size, trials, nodes = matrices.shape
    rows = chance.random((size, trials, 1)) < MUTATED_ROWS / trials
    entries = chance.random(matrices.shape) < 1.0 / nodes
    values = chance.integers(0, room + 1, matrices.shape)
    kept = np.where(chance.random((size, trials, 1)) < 0.5, 0, matrices)
    return np.where(rows, np.where(entries, values, kept), matrices)


class _Problem:
    def __init__(self, snapshot: Snapshot, views: list[TrialView]) -> None:
        self.room = np.array([node.slots for node in snapshot.nodes], dtype=np.int64)
        self.present = np.array([[view.placement.get(node.name, 0) for node in snapshot.nodes] for view in views])
        self._views = views
        self._total = snapshot.total_slots
        grid, values = _objective(views, snapshot)
        every = np.arange(self._total + 1)
        below = np.maximum(np.searchsorted(grid, every, side="right") - 1, 0)
        # A count between two of the grid is worth what the next one below is.
        self._values = np.where(np.isfinite(values), values, -1e6)[:, below]
        self._most = np.array([largest_count(view) for view in views], dtype=np.int64)
        self._least = np.array([view.min_slots for view in views], dtype=np.int64)

    def present_if_possible(self) -> Integers:
        """Return what trials hold now, or nothing where nodes, or what a trial may have, have become smaller."""
        allowed = np.where((self.present.sum(axis=1) <= self._most)[:, None], self.present, 0)
        possible = (allowed.sum(axis=0) <= self.room).all()
        return allowed if possible else np.zeros_like(self.present)

    def repaired(self, matrices: Integers, chance: np.random.Generator) -> Integers:
        """Return the matrices within limits and nodes, with at most one distributed trial on a node."""
        matrices = matrices.astype(np.int64)
        order = chance.permuted(np.tile(np.arange(matrices.shape[1]), (len(matrices), 1)), axis=1)
        matrices = np.take_along_axis(matrices, order[:, :, None], axis=1)
        # Of each node the first trials in a random order keep theirs, of each trial the first nodes.
        before = np.cumsum(matrices, axis=1) - matrices
        matrices = np.clip(matrices, 0, np.maximum(self.room - before, 0))
        most = np.take_along_axis(np.tile(self._most, (len(matrices), 1)), order, axis=1)[:, :, None]
        before = np.cumsum(matrices, axis=2) - matrices
        matrices = np.clip(matrices, 0, np.maximum(most - before, 0))
        distributed = (matrices > 0).sum(axis=2, keepdims=True) > 1
        first = np.cumsum(distributed & (matrices > 0), axis=1) <= 1
        matrices = np.where(distributed & ~first, 0, matrices)
        back = np.argsort(order, axis=1)
        matrices = np.take_along_axis(matrices, back[:, :, None], axis=1)
        enough = matrices.sum(axis=2, keepdims=True) >= self._least[:, None]
        return np.asarray(np.where(enough, matrices, 0))

    def fitness(self, matrices: Integers) -> Floats:
        counts = np.minimum(matrices.sum(axis=2), self._total)
        values = self._values[np.arange(len(self._views)), counts]
        moved = (matrices != self.present).any(axis=2) & (self.present.sum(axis=1) > 0)
        same_size = counts == self.present.sum(axis=1)
        # Moving costs a restart as well; the values charge it to changes of size only.
        return np.asarray((values * np.where(moved & same_size, 1.05, 1.0)).sum(axis=1))
