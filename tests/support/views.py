"""Trials as policies see them, made at random or by hand, for tests."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hypothesis import strategies as st

from dist_core.goodput import BatchBounds, ThroughputParams
from scheduler.knowledge.profile import StudyProfile, TrialModel
from scheduler.simulator.rivals import COMPARED
from scheduler.snapshot import NodeView, Snapshot, TrialView

SEARCHES = "pollux_search"
"""A policy that searches for its answer: tests of many snapshots leave it to the slow ones."""
AT_ONCE = [name for name in COMPARED if name != SEARCHES]


def model(*, overhead: float = 0.01, var: float = 50.0, seen: int = 8) -> TrialModel:
    return TrialModel(
        profile=StudyProfile(
            params=ThroughputParams(0.02, 0.001, overhead * 1.1, 0.001, overhead, 0.001, 1.5), most_replicas=seen
        ),
        noise=var,
        bounds=BatchBounds(init_batch=64, max_batch=2048, min_atomic=8, max_atomic=256),
    )


ONE_SLOT = float(model().goodput(1, 1)[0])
"""Goodput of a replica."""


def running(name: str, slots_held: int = 1, **changes: Any) -> TrialView:
    view = TrialView(
        trial_id=name,
        study="s",
        min_slots=1,
        max_slots=8,
        placement={"n0": slots_held},
        can_rescale=True,
        model=model(),
        remaining_progress=300.0 * ONE_SLOT,
        num_rescales=1,
    )
    return replace(view, **changes)


def waiting(name: str, **changes: Any) -> TrialView:
    return replace(TrialView(trial_id=name, study="s", min_slots=1, max_slots=8), **changes)


def snapshot(*trials: TrialView, slots: int = 4, nodes: int = 1, coming: tuple[TrialView, ...] = ()) -> Snapshot:
    return Snapshot(
        now=0.0,
        nodes=tuple(NodeView(name=f"n{index}", slots=slots) for index in range(nodes)),
        trials=trials,
        coming=coming,
    )


views = st.builds(
    lambda number, minimum, extra, held, ready, promise, seen, var, since, weight, stopped: TrialView(
        trial_id=f"t{number}",
        study="s",
        min_slots=minimum,
        max_slots=minimum + extra,
        placement={"n0": held} if held else {},
        can_rescale=ready and held > 0,
        model=model(var=var, seen=seen) if ready else None,
        promise=promise,
        since_rescale_seconds=since,
        study_weight=weight,
        held="stopped" if stopped else None,
    ),
    st.integers(0, 10**6),
    st.integers(1, 4),
    st.integers(0, 6),
    st.integers(0, 3),
    st.booleans(),
    st.floats(0.01, 0.99),
    st.integers(1, 8),
    st.floats(0.0, 1e4),
    st.floats(0.0, 100.0),
    st.floats(0.1, 10.0),
    st.integers(0, 9).map(lambda value: value == 0),
)


def that_fit(trials: list[TrialView], slots: int) -> list[TrialView]:
    """Those that can hold what they hold at once, all on the first node."""
    kept, used = [], 0
    for view in trials:
        if used + view.held_slots <= slots and view.held_slots <= view.max_slots:
            used += view.held_slots
            kept.append(view)
    return kept
