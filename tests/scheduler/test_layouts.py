"""How a trial's replicas hold its model is chosen: by memory, by what was measured, else by what is predicted."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.mixed_sizes import fewest_slots, mixed_sizes
from dist_core.goodput import BatchBounds, Configuration, Hints, Observation
from dist_core.goodput.layout_terms import LayoutTerms, usable
from dist_core.layout import Layout
from scheduler.knowledge.layouts import layout_options, present_layout
from scheduler.knowledge.study_history import StudyHistory
from scheduler.policy import policy_by_name
from scheduler.simulator.cluster import SimulationSettings
from scheduler.simulator.replicas import LIVE
from scheduler.simulator.world import SimulationResult, World
from scheduler.snapshot import LayoutOption, NodeView, TrialView, check_grants
from tests.support.loop_bench import Bench
from tests.support.views import model, running, snapshot, views, waiting
from trials.record import SlotQuota, TrialRecord
from trials.spec import TrialSpec
from trials.states import TrialState

GB = 1e9
BOUNDS = BatchBounds(init_batch=64, max_batch=64, min_atomic=8)
TERMS = (
    LayoutTerms(Layout(1), 1e-3, 6 * GB, 0.01 * GB),
    LayoutTerms(Layout(2, "sharded"), 1.1e-3, 3.2 * GB, 0.01 * GB),
    LayoutTerms(Layout(2, "stages"), 0.6e-3, 3.5 * GB, 0.02 * GB),
    LayoutTerms(Layout(4, "stages"), 0.35e-3, 1.8 * GB, 0.02 * GB),
    LayoutTerms(Layout(4, "stages", recomputes=True), 0.45e-3, 1.8 * GB, 0.001 * GB),
)


def rows(layout: str, shares: int, seconds: float) -> list[Observation]:
    return [
        Observation(Configuration(1, shares, batch, "", layout), seconds * batch, 1.05 * seconds * batch, 30)
        for batch in (16, 32, 64)
    ]


def told(*observations: Observation, layout: str = "2 stages", memory: float = 5 * GB, **changes: Any) -> Hints:
    given: dict[str, Any] = {"bounds": BOUNDS, "layouts": TERMS, "slot_memory_bytes": memory, **changes}
    return Hints(
        observations=observations, layout=layout, slots_per_share=Layout.from_name(layout).slots_per_share, **given
    )


def a_trial(layout: str = "", sizes: tuple[int, ...] = (1, 2, 4), **changes: Any) -> TrialRecord:
    spec = TrialSpec(study="s", number=0, entrypoint="m:f", max_replicas=4, replica_sizes=sizes)
    return TrialRecord(trial_id="t", spec=spec, layout=layout, **changes)


def history_of(**hints: Hints) -> StudyHistory:
    history = StudyHistory()
    for name, each in hints.items():
        history.note(name, each)
    history.refresh(0.0)
    return history


# ---------------------------------------------------------------------- names and memory


@given(st.integers(1, 1024), st.sampled_from(["", "sharded", "stages"]), st.booleans())
def test_a_layout_is_read_from_its_name(slots: int, kind: str, recomputes: bool) -> None:
    layout = Layout(slots, kind, recomputes)
    assert Layout.from_name(str(layout)) == layout


@pytest.mark.parametrize("name", ["", "0", "two", "2 shards", "2 stages twice", "2 stages sharded", "-1", "2000"])
def test_what_is_no_layout_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="is not a layout"):
        Layout.from_name(name)


def test_a_model_that_fits_on_one_slot_is_not_divided() -> None:
    assert [str(each.layout) for each in usable(TERMS, 8 * GB)] == ["1"]
    assert {each.layout.slots for each in usable(TERMS, 4 * GB)} == {2, 4}
    assert [str(each.layout) for each in usable(TERMS, 1.85 * GB, min_atomic=8)] == ["4 stages recomputed"]
    assert usable(TERMS, 1 * GB) == []


def test_memory_bounds_the_batch() -> None:
    assert TERMS[0].most_examples(7 * GB) == pytest.approx(100)
    wide = BatchBounds(init_batch=64, max_batch=2048, min_atomic=8)
    assert TERMS[0].bounds(wide, 7 * GB).max_atomic == 100
    assert TERMS[0].bounds(wide, math.inf) == wide


def test_hints_carry_layouts() -> None:
    hints = told(*rows("2 stages", 1, 1e-3))
    assert Hints.from_json(hints.to_json()) == hints
    untold = Hints(bounds=None, layouts=TERMS)
    assert Hints.from_json(untold.to_json()) == untold
    for wrong in (
        {"layouts": [["1", -1.0, 0.0, 0.0]]},
        {"layouts": [["1", True, 0.0, 0.0]]},
        {"layouts": [["one", 1.0, 0.0, 0.0]]},
        {"layouts": 2 * [["1", 1.0, 0.0, 0.0]]},
        {"layouts": [[f"{slots}", 1.0, 0.0, 0.0] for slots in range(1, 66)]},
        {"layout": "no"},
        {"layout": 7},
        {"observations": [[1, 1, 8, 0.1, 0.1, 5, "", "any layout"]]},
        {"bounds": None},
    ):
        with pytest.raises(ValueError, match=r"layout|bounds"):
            Hints.from_json({**hints.to_json(), **wrong})


# ---------------------------------------------------------------------- what there is to choose from


def test_without_word_of_the_code_a_replica_takes_the_least_slots() -> None:
    [only] = layout_options(a_trial(), None, StudyHistory(), starts=False)
    assert (only.layout, only.slots_per_replica, only.max_slots) == ("1", 1, 4)
    assert layout_options(a_trial(sizes=()), None, StudyHistory(), starts=False) == ()


def test_another_trials_word_counts_until_the_trial_has_its_own() -> None:
    history = history_of(other=told(*rows("2 stages", 1, 1e-3)))
    found = layout_options(a_trial(), None, history, starts=False)
    assert {each.layout for each in found} == {"2 sharded", "2 stages", "4 stages", "4 stages recomputed"}
    # One that is about to say it is not started anew for what others have said.
    assert [each.layout for each in layout_options(a_trial("1"), None, history, starts=True)] == ["1"]
    # And its own word counts, whatever theirs is.
    mine = told(layouts=tuple(replace(each, fixed_bytes=each.fixed_bytes / 2) for each in TERMS))
    assert [each.layout for each in layout_options(a_trial("2 stages"), mine, history, starts=True)] == ["1"]


def test_the_smallest_slots_limit_what_is_offered_but_not_what_trains_already() -> None:
    large = told(*rows("1", 1, 1e-3), layout="1", memory=80 * GB)
    history = history_of(t=large)
    alone = {each.layout for each in layout_options(a_trial("1"), large, history, starts=True)}
    history.note("other", told(layout="4 stages", memory=5 * GB))
    beside = {each.layout for each in layout_options(a_trial("1"), large, history, starts=True)}
    assert alone == {"1"} and beside > alone
    assert "1" not in {each.layout for each in layout_options(a_trial("1"), None, history, starts=False)}
    # On small slots it says so, and leaves; and the small ones count for nothing once nobody is there.
    small = told(*rows("1", 1, 1e-3), layout="1", memory=5 * GB)
    assert "1" not in {each.layout for each in layout_options(a_trial("1"), small, history, starts=True)}
    history.note_end("other", stopped=False)
    assert {each.layout for each in layout_options(a_trial("1"), large, history, starts=True)} == alone


def test_only_sizes_that_the_trial_allows_are_offered() -> None:
    history = history_of(t=told(*rows("2 stages", 1, 1e-3)))
    found = layout_options(a_trial(sizes=(1, 2)), told(), history, starts=True)
    assert {each.slots_per_replica for each in found} == {2}


def test_what_was_not_measured_is_as_the_predictions_are_to_each_other() -> None:
    hints = told(*rows("2 stages", 1, 1e-3), *rows("2 stages", 2, 1e-3))
    history = history_of(t=hints)
    options = {each.layout: each for each in layout_options(a_trial("2 stages"), hints, history, starts=True)}
    two, four = np.array([2]), np.array([4])

    def speed(layout: str, slots: Any) -> float:
        found = options[layout].model
        assert found is not None
        return float(found.curve(8, slots)[0])

    assert speed("4 stages", four) / speed("2 stages", two) == pytest.approx(0.6 / 0.35, rel=0.02)
    assert speed("4 stages recomputed", four) / speed("4 stages", four) == pytest.approx(0.35 / 0.45, rel=0.02)
    measured = told(*hints.observations, *rows("4 stages", 1, 2e-3))
    history = history_of(t=measured)
    options = {each.layout: each for each in layout_options(a_trial("2 stages"), measured, history, starts=True)}
    assert speed("4 stages", four) / speed("2 stages", two) == pytest.approx(0.5, rel=0.02)
    # What is most like it says most of what was not measured.
    assert speed("4 stages recomputed", four) / speed("4 stages", four) == pytest.approx(0.35 / 0.45, rel=0.02)


def test_a_wider_model_is_known_to_be_slower_before_it_has_trained() -> None:
    narrow = told(*rows("2 stages", 1, 1e-3))
    wide = replace(told(), layouts=tuple(replace(each, seconds=4 * each.seconds) for each in TERMS))
    history = history_of(narrow=narrow, wide=wide)
    terms = wide.layouts[2]
    mine, others = history.model_of("wide", wide, terms, 5 * GB), history.model_of("narrow", narrow, TERMS[2], 5 * GB)
    assert mine is not None and others is not None
    assert float(others.goodput(1, 1)[0] / mine.goodput(1, 1)[0]) == pytest.approx(4.0)


def test_what_was_measured_before_there_was_a_choice_is_of_whole_models() -> None:
    before = Hints(bounds=BOUNDS, observations=tuple(rows("", 1, 1e-3)))
    history = history_of(before=before, t=told(layout="1", bounds=None))
    plain = history.model("before", before)
    whole = history.model_of("t", told(layout="1", bounds=None), TERMS[0], 20 * GB)
    assert plain is not None and whole is not None
    assert float(whole.goodput(1, 1)[0]) == pytest.approx(float(plain.goodput(1, 1)[0]))


def test_the_code_says_what_a_number_of_slots_is() -> None:
    assert present_layout(a_trial("2"), told(layout="2 stages")) == "2 stages"
    assert present_layout(a_trial("4"), told(layout="2 stages")) == "4"
    assert present_layout(a_trial("2 sharded"), told(layout="2 stages")) == "2 sharded"
    assert present_layout(a_trial(""), None) == ""


# ---------------------------------------------------------------------- what the policy makes of it


def option(layout: str, speed: float = 1.0, replicas: int = 4) -> LayoutOption:
    """``speed``: of its steps."""
    read = Layout.from_name(layout)
    made = replace(model().slower(1.0 / speed), slots_per_share=read.slots_per_share)
    return LayoutOption(
        layout=layout,
        slots_per_replica=read.slots,
        min_slots=read.slots,
        max_slots=replicas * read.slots,
        model=made,
    )


def with_choice(view: TrialView, *options: LayoutOption, layout: str = "") -> TrialView:
    view = replace(view, layout=layout, options=options)
    present = view.option()
    return replace(
        view,
        min_slots=min(each.min_slots for each in options),
        max_slots=max(each.max_slots for each in options),
        slots_per_replica=present.slots_per_replica,
        model=present.model,
    )


def test_the_policy_takes_the_fastest_layout_for_what_it_grants() -> None:
    policy = policy_by_name("goodput")
    slow, fast = option("2 sharded", 0.3), option("4 stages", 3.0)
    grant = policy.allocate(snapshot(with_choice(waiting("a"), slow, fast), slots=4))["a"]
    assert (grant.layout, grant.slots) == ("4 stages", 4)
    assert grant.reason.sentence == "starts on 4 slots, 4 stages"
    grant = policy.allocate(snapshot(with_choice(waiting("a"), slow, fast), slots=3))["a"]
    assert (grant.layout, grant.slots) == ("2 sharded", 2)


def test_another_layout_has_to_be_worth_a_start() -> None:
    policy = policy_by_name("goodput")
    present, little, much = option("4 stages"), option("4 sharded", 0.27), option("4 sharded", 0.6)
    for other, wanted in ((little, "4 stages"), (much, "4 sharded")):
        view = with_choice(running("a", 4, since_rescale_seconds=1e3), present, other, layout="4 stages")
        grant = policy.allocate(snapshot(view, slots=4))["a"]
        assert grant.layout == wanted, grant
    assert grant.reason.code == "other_layout"
    assert grant.reason.sentence.startswith(
        "changes its layout from 4 stages to 4 sharded, on 4 slots: predicted goodput x"
    )
    # One that is about to end does not start again.
    view = replace(view, remaining_progress=1.0)
    assert policy.allocate(snapshot(view, slots=4))["a"].layout == "4 stages"


def test_what_does_not_fit_any_more_is_left_at_once() -> None:
    policy = policy_by_name("goodput")
    view = with_choice(running("a", 2, can_rescale=False), option("4 stages"), layout="2 stages")
    grant = policy.allocate(snapshot(view, slots=4))["a"]
    assert (grant.layout, grant.slots) == ("4 stages", 4)


def test_other_policies_keep_to_one_layout() -> None:
    view = with_choice(running("a", 2), option("4 stages", 9.0), option("2 sharded"), layout="2 sharded")
    for name in ("fifo", "fair_share", "top_job"):
        grant = policy_by_name(name).allocate(snapshot(view, slots=4))["a"]
        assert grant.layout == "2 sharded" and grant.slots % 2 == 0
        fresh = with_choice(waiting("a"), option("4 stages"), option("2 sharded"))
        assert policy_by_name(name).allocate(snapshot(fresh, slots=4))["a"].layout == "4 stages"


LAYOUTS = ("1", "2 sharded", "2 stages", "3 stages", "4 sharded", "4 stages recomputed", "8 stages")


@settings(max_examples=150, deadline=None)
@given(
    trials=st.lists(
        st.tuples(
            views, st.lists(st.sampled_from(LAYOUTS), min_size=1, max_size=4, unique=True), st.sampled_from(LAYOUTS)
        ),
        max_size=6,
        unique_by=lambda each: each[0].trial_id,
    ),
    nodes=st.integers(1, 3),
    slots=st.integers(1, 8),
    quota=st.integers(0, 8),
)
def test_every_policy_grants_whole_replicas_of_the_layouts_there_are(
    trials: list[tuple[TrialView, list[str], str]], nodes: int, slots: int, quota: int
) -> None:
    made = []
    room = slots
    for view, layouts, present in trials:
        held = min(view.held_slots // Layout.from_name(present).slots * Layout.from_name(present).slots, room)
        held = held if present in layouts and held % Layout.from_name(present).slots == 0 else 0
        room -= held
        view = replace(view, placement={"n0": held} if held else {}, held=view.held)
        made.append(with_choice(view, *map(option, layouts), layout=present if held else ""))
    seen = snapshot(*made, slots=slots, nodes=nodes)
    for name in ("goodput", "fifo", "fair_share", "top_job"):
        grants = policy_by_name(name).allocate(seen)
        check_grants(seen, grants)
        for view in made:
            grant = grants[view.trial_id]
            assert not grant.slots or grant.layout in {each.layout for each in view.options}


# ---------------------------------------------------------------------- and the loop of it


def test_a_trial_goes_on_with_another_layout_when_its_replicas_have_left(tmp_path: Path) -> None:
    bench = Bench(tmp_path, slots=4)
    trial_id = bench.submit(max_replicas=1, replica_sizes=(1, 2, 4))
    bench.tick()
    [first] = bench.store.replicas(trial_id=trial_id)
    environ = bench.launcher.running[first.replica_id].environ
    assert (environ["ELASTUNE_LAYOUT"], environ["ELASTUNE_REPLICA_SIZES"]) == ("1", "1,2,4")
    # It says that it does not fit, and leaves.
    bench.store.put_hints(trial_id, told(layout="1", bounds=None).to_json())
    bench.launcher.end(first.replica_id, 143)
    bench.loop.decisions.decide_anew()
    bench.tick(3)
    started = bench.store.replicas(trial_id=trial_id)
    record = bench.trial(trial_id)
    assert record.layout == "2 stages" and record.losses == 0, "nothing was measured: the first that fits"
    assert [row.launch_index for row in started] == [0, 1]
    bench.train(trial_id)
    # Once it has trained for a while, four stages are predicted to be worth a start.
    bench.store.put_hints(trial_id, told(*rows("2 stages", 1, 1e-3), layout="2 stages").to_json())
    bench.tick(80)
    record = bench.trial(trial_id)
    assert record.published_members == () and record.switching, record.reason
    for row in bench.store.replicas(trial_id=trial_id):
        bench.launcher.end(row.replica_id, 0)
    bench.tick(4)
    record, started = bench.trial(trial_id), bench.store.replicas(trial_id=trial_id)
    assert record.layout == "4 stages" and len(started) == 4
    assert [row.launch_index for row in started] == [0, 1, 2, 3]
    assert {bench.launcher.running[row.replica_id].environ["ELASTUNE_LAYOUT"] for row in started} == {"4 stages"}
    assert record.state is TrialState.STARTING
    words = [entry.reason.sentence for entry in bench.store.history(trial_id)]
    assert any(each.startswith("changes its layout from 2 stages to 4 stages, on 4 slots") for each in words), words


def test_its_first_word_of_an_open_number_of_slots_starts_nothing_anew(tmp_path: Path) -> None:
    bench = Bench(tmp_path, slots=4)
    trial_id = bench.submit(max_replicas=1, replica_sizes=(2, 4))
    bench.train(trial_id)
    assert bench.trial(trial_id).layout == "2"
    bench.store.put_hints(trial_id, told(layout="2 sharded").to_json())
    bench.tick(3)
    record = bench.trial(trial_id)
    assert record.layout == "2 sharded" and not record.switching


def test_a_trial_that_may_not_choose_is_left_as_it_is(tmp_path: Path) -> None:
    """Another one of its study may, and has said what its code can do."""
    bench = Bench(tmp_path, slots=4)
    chooses = bench.submit(max_replicas=1, replica_sizes=(1, 2))
    plain = bench.submit(number=1, max_replicas=1)
    bench.train(chooses)
    bench.train(plain)
    bench.store.put_hints(chooses, told(layout="1", memory=20 * GB).to_json())
    bench.tick(10)
    assert bench.trial(plain).state is TrialState.RUNNING and bench.trial(plain).layout == ""


def test_what_a_trial_has_run_out_of_memory_with_is_not_offered_again() -> None:
    history = history_of(t=told(*rows("2 stages", 1, 1e-3)))
    without = tuple(each for each in TERMS if str(each.layout) != "2 stages")
    history.note("t", told(layouts=without))
    # A new process whose folder is empty knows nothing of it.
    history.note("t", told())
    found = {each.layout for each in layout_options(a_trial("4 stages"), told(), history, starts=True)}
    assert found == {"2 sharded", "4 stages", "4 stages recomputed"}


def test_replicas_that_leave_again_and_again_are_waited_for(tmp_path: Path) -> None:
    """Their word does not arrive, or nothing else is decided."""
    bench = Bench(tmp_path, slots=4)
    trial_id = bench.submit(max_replicas=1, replica_sizes=(1, 2))
    started = 0
    for _ in range(240):
        bench.tick()
        for row in bench.store.replicas(trial_id=trial_id):
            started += 1
            bench.launcher.end(row.replica_id, 143)
    assert 3 < started < 8
    assert bench.trial(trial_id).losses == 0


def test_a_layout_without_a_place_gives_way_to_one_that_has(tmp_path: Path) -> None:
    policy = policy_by_name("goodput")
    fast, small = option("4 stages", 3.0), option("2 stages")
    busy = [
        running(f"b{index}", placement={f"n{index}": 2}, max_slots=2, min_slots=2, since_rescale_seconds=0.0)
        for index in range(2)
    ]
    mine = with_choice(running("a", placement={"n0": 2}, since_rescale_seconds=1e3), fast, small, layout="2 stages")
    grant = policy.allocate(snapshot(mine, *busy, slots=4, nodes=2))["a"]
    assert (grant.layout, dict(grant.placement)) == ("2 stages", {"n0": 2, "n1": 2})
    waits = with_choice(waiting("a"), fast, small)
    grant = policy.allocate(snapshot(waits, *busy, slots=4, nodes=2))["a"]
    assert (grant.layout, dict(grant.placement)) == ("2 stages", {"n0": 2, "n1": 2})


def test_a_quota_leaves_the_layouts_that_it_has_room_for() -> None:
    policy = policy_by_name("goodput")
    quota = (SlotQuota("study s", 3, "its study's quota of 3 slots leaves too few for it"),)
    view = with_choice(waiting("a", quotas=quota), option("4 stages", 3.0), option("2 stages"))
    grant = policy.allocate(snapshot(view, slots=8))["a"]
    assert (grant.layout, grant.slots) == ("2 stages", 2)


def test_what_is_set_aside_makes_no_node_smaller() -> None:
    policy = policy_by_name("goodput")
    kept = [running(f"k{index}", placement={f"n{index}": 1}, max_slots=1, preemptible=False) for index in range(2)]
    large = waiting("a", min_slots=4, max_slots=4, slots_per_replica=4)
    seen = snapshot(*kept, large, slots=4, nodes=2)
    grants = policy.allocate(seen)
    check_grants(seen, grants)
    assert not grants["a"].slots
    # Nor one of another kind larger: there a replica of eight takes two nodes.
    kinds = (*seen.nodes[:1], *(NodeView(name=f"x{index}", slots=8, kind="x") for index in range(2)))
    kept = [running("k", placement={"n0": 1}, max_slots=1, preemptible=False)]
    wide = waiting("w", min_slots=12, max_slots=12, slots_per_replica=12, only_on=("x",))
    grants = policy.allocate(replace(seen, nodes=(replace(kinds[0], slots=16), *kinds[1:]), trials=(*kept, wide)))
    assert sum(grants["w"].placement.values()) == 12
    # And one that may not be preempted keeps what it has, although it would fit on one slot now.
    mine = with_choice(running("b", 2, preemptible=False), option("1"), layout="2 stages")
    assert policy.allocate(snapshot(mine, slots=4))["b"].placement == {"n0": 2}


# ---------------------------------------------------------------------- and what it is worth


@pytest.mark.slow
def test_simulated_jobs_end_sooner_where_layouts_are_chosen() -> None:
    """Models for one, two and four slots; the same jobs, each held as a careful user would fix it."""
    jobs = mixed_sizes(14, seed=1)
    settings = SimulationSettings(nodes=4, slots_per_node=4)
    policy = policy_by_name("goodput")
    chosen = World(jobs, policy, settings).run()
    fixed = World([fewest_slots(each) for each in jobs], policy, settings).run()

    def mean(result: SimulationResult) -> float:
        return float(np.mean([job.completion_seconds for job in result.jobs]))

    assert mean(chosen) < 0.9 * mean(fixed)
    told = [entry for history in chosen.histories.values() for entry in history]
    assert any(entry.why.startswith("changes its layout from ") for entry in told), "some went on with another layout"
    for job in jobs:
        assert job.choices is not None
        words = " ".join(each.why for each in chosen.histories[job.name])
        if job.choices.fits(Layout(1)):
            assert "stages" not in words and "sharded" not in words, words


def test_a_simulated_job_without_room_is_started_with_another_layout() -> None:
    [job] = [each for each in mixed_sizes(8, seed=0) if each.name == "model-1.2b-0"]
    for timing, every in ((None, 60.0), (LIVE, 15.0)):
        settings = SimulationSettings(nodes=1, slots_per_node=4, timing=timing, decide_every_seconds=every)
        result = World([replace(job, at=0.0)], policy_by_name("goodput"), settings).run()
        whys = [each.why for each in result.histories[job.name]]
        assert whys[0] == "starts on 1 slot, whole"
        assert whys[1] == "saved its state and gave its slots back"
        assert whys[2] == "starts on 2 slots, 2 stages"
        [record] = result.jobs
        assert record.num_rescales > 0
