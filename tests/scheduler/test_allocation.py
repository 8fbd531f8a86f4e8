"""Searching counts, packing them, and pricing work: each against what can be worked out by hand or by force."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler.allocation.completion import FluidSchedule, prices, rank_weights
from scheduler.allocation.counts import envelope, exact_counts, greedy_counts
from scheduler.allocation.placement import packed
from scheduler.snapshot import NodeView

COUNTS = np.array([0, 1, 2, 4])


def by_force(values: np.ndarray, total: int) -> float:
    best = -np.inf
    for choice in itertools.product(range(len(COUNTS)), repeat=len(values)):
        if COUNTS[list(choice)].sum() <= total:
            best = max(best, float(sum(values[row, index] for row, index in enumerate(choice))))
    return best


tables = st.integers(1, 4).flatmap(
    lambda rows: st.lists(
        st.lists(st.floats(0.0, 10.0), min_size=3, max_size=3).map(lambda tail: [0.0, *tail]),
        min_size=rows,
        max_size=rows,
    ).map(np.array)
)


@settings(max_examples=100, deadline=None)
@given(tables, st.integers(0, 10))
def test_the_exact_search_finds_the_optimum(values: np.ndarray, total: int) -> None:
    chosen = exact_counts(COUNTS, values, total)
    assert COUNTS[chosen].sum() <= total
    found = sum(values[row, index] for row, index in enumerate(chosen))
    assert found == pytest.approx(by_force(values, total))


@settings(max_examples=100, deadline=None)
@given(tables, st.integers(0, 10))
def test_the_greedy_search_is_within_a_step_of_the_optimum(values: np.ndarray, total: int) -> None:
    chosen = greedy_counts(COUNTS, values, total)
    assert COUNTS[chosen].sum() <= total
    found = sum(values[row, index] for row, index in enumerate(chosen))
    assert found >= by_force(values, total) - values.max() - 1e-9


def test_forbidden_counts_are_not_chosen() -> None:
    values = np.array([[0.0, -np.inf, 5.0, -np.inf], [-np.inf, 1.0, 2.0, 9.0]])
    for search in (exact_counts, greedy_counts):
        assert list(COUNTS[search(COUNTS, values, 4)]) in ([0, 4], [2, 2])
        assert list(COUNTS[search(COUNTS, values, 2)]) == [0, 2]


def test_the_envelope_leaves_out_what_lies_below_it() -> None:
    steps = envelope(list(COUNTS), [0.0, 1.0, 4.0, 5.0], 0, 7)
    assert steps == [(2.0, 7, 0, 2), (0.5, 7, 2, 3)]


placements = st.dictionaries(
    st.sampled_from("abcdef"), st.dictionaries(st.sampled_from(["n0", "n1", "n2"]), st.integers(1, 2)), max_size=4
)


@settings(max_examples=200, deadline=None)
@given(st.dictionaries(st.sampled_from("abcdef"), st.integers(0, 8)), placements, st.sets(st.sampled_from("abcdef")))
def test_packing_never_exceeds_a_node_and_places_what_fits(
    counts: dict[str, int], current: dict[str, dict[str, int]], rooted: set[str]
) -> None:
    nodes = [NodeView(name=f"n{index}", slots=4) for index in range(3)]
    placed = packed(counts, nodes, current, rooted=rooted)
    for node in nodes:
        assert sum(placement.get(node.name, 0) for placement in placed.values()) <= node.slots
    for trial, placement in placed.items():
        assert 0 < sum(placement.values()) <= counts[trial]
    if sum(counts.values()) <= 4:
        assert {trial: sum(placed.get(trial, {}).values()) for trial in counts} == counts


def test_packing_leaves_trials_where_they_are_and_uses_few_nodes() -> None:
    nodes = [NodeView(name=f"n{index}", slots=4) for index in range(3)]
    current = {"a": {"n1": 2}, "b": {"n0": 1}}
    placed = packed({"a": 2, "b": 1, "c": 4, "d": 2}, nodes, current)
    assert placed == {"a": {"n1": 2}, "b": {"n0": 1}, "c": {"n2": 4}, "d": {"n1": 2}}


def test_a_large_trial_makes_small_ones_move_together() -> None:
    nodes = [NodeView(name=f"n{index}", slots=4) for index in range(2)]
    placed = packed({"a": 1, "b": 1, "c": 4}, nodes, {"a": {"n0": 1}, "b": {"n1": 1}})
    assert sorted(len(placement) for placement in placed.values()) == [1, 1, 1]
    assert sum(placed["c"].values()) == 4


def test_rank_weights_favour_little_work() -> None:
    weights = rank_weights(np.array([[5.0, 1.0, 0.0]]), spread=0.5)
    assert weights[0, 2] == 0.0
    assert weights[0, 1] > weights[0, 0] > 0.0


def test_a_fluid_schedule_of_equal_trials_ends_when_it_must() -> None:
    schedule = FluidSchedule([[(1.0, 1.0)], [(1.0, 1.0)]], total=1.0)
    # One after the other on one slot: done after 3 and after 3 + 6 seconds.
    assert schedule.total_completion(np.array([[6.0, 3.0]]))[0] == pytest.approx(12.0)


def test_work_of_the_trial_that_others_wait_for_is_dearer() -> None:
    segments = [[(1.0, 1.0)], [(1.0, 1.0)]]
    price = prices(np.array([600.0, 3.0]), lambda: segments, total=1.0)
    assert price[1] == pytest.approx(2.0, rel=0.01)
    assert price[0] == pytest.approx(1.0, rel=0.01)


def test_rooted_trials_shrink_and_grow_where_they_are() -> None:
    nodes = [NodeView(name=f"n{index}", slots=4) for index in range(3)]
    current = {"a": {"n0": 2}, "b": {"n1": 1}, "c": {"n2": 2}}
    counts = {"a": 1, "b": 2, "c": 2}
    placed = packed(counts, nodes, current, rooted={"a", "b"})
    assert placed == {"a": {"n0": 1}, "b": {"n1": 2}, "c": {"n2": 2}}
    assert packed(counts, nodes, current)["b"] == {"n2": 2}


def packed_cluster(chance: random.Random) -> tuple[list[NodeView], dict[str, dict[str, int]]]:
    """Trials that hold slots of full nodes, as they came."""
    nodes = [NodeView(name=f"n{index}", slots=4) for index in range(3)]
    slots = [node.name for node in nodes for _ in range(node.slots)]
    chance.shuffle(slots)
    current: dict[str, dict[str, int]] = {}
    for slot in slots:
        held = current.setdefault(chance.choice("abcde"), {})
        held[slot] = held.get(slot, 0) + 1
    return nodes, current


@settings(max_examples=300, deadline=None)
@given(st.randoms(use_true_random=False))
def test_rooted_trials_never_wait_for_each_others_slots(chance: random.Random) -> None:
    nodes, current = packed_cluster(chance)
    total = {name: sum(held.values()) for name, held in current.items()}
    # Some shrink, and others grow into what that leaves.
    counts = {name: max(1, count - chance.randint(0, 2)) for name, count in total.items()}
    free = sum(total.values()) - sum(counts.values())
    for name in chance.sample(sorted(counts), len(counts)):
        more = chance.randint(0, free)
        counts[name], free = counts[name] + more, free - more
    placed = packed(counts, nodes, current, rooted=set(current))
    for name in current:
        assert sum(placed[name].values()) >= min(total[name], counts[name])
    # Changes that need only what is free now, or was given up without a move, go first; in the end all are made.
    holds = {name: dict(held) for name, held in current.items()}
    changed = True
    while changed:
        changed = False
        room = {node.name: node.slots - sum(held.get(node.name, 0) for held in holds.values()) for node in nodes}
        for name, wanted in placed.items():
            missing = {node: count - holds[name].get(node, 0) for node, count in wanted.items()}
            if holds[name] != dict(wanted) and all(room[node] >= count for node, count in missing.items()):
                holds[name] = dict(wanted)
                changed = True
                break
    assert holds == {name: dict(wanted) for name, wanted in placed.items()}


def test_who_is_left_alone_stays_on_more_nodes_than_it_needs() -> None:
    nodes = [NodeView(name=f"n{index}", slots=4) for index in range(2)]
    current = {"a": {"n0": 1, "n1": 1}}
    assert packed({"a": 2}, nodes, current, left_alone={"a"}) == current
    assert len(packed({"a": 2}, nodes, current)["a"]) == 1
    assert len(packed({"a": 3}, nodes, current, left_alone={"a"})["a"]) == 1
