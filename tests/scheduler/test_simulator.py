"""The simulator: the live loop in virtual time, over workloads and measurements."""

from __future__ import annotations

import itertools
import json
import os
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from scheduler.cli import command_line
from scheduler.loop.control_loop import ControlLoop
from scheduler.simulator.application import InvalidWorkload, measured_application
from scheduler.simulator.cluster import SimulationSettings
from scheduler.simulator.command import compare
from scheduler.simulator.replicas import LIVE, Timing
from scheduler.simulator.rivals import COMPARED, compared_policy
from scheduler.simulator.sweep import SuccessiveHalving, SweepSettings, SweepWorld, learning_curves
from scheduler.simulator.training import SimulatedTraining, shares_on
from scheduler.simulator.workload import SMALL, Submission, read_workload, synthetic_workload
from scheduler.simulator.world import World

SETTINGS = SimulationSettings(nodes=4, slots_per_node=4)


def job(number: int = 0, at: float = 0.0, replicas: int = 2) -> Submission:
    return Submission(name=f"j{number}", at=at, application=SMALL, num_replicas=replicas, batch_size=512)


@pytest.mark.parametrize("policy", COMPARED)
def test_every_policy_finishes_a_workload_the_same_way_twice(policy: str) -> None:
    jobs = synthetic_workload(3, seed=3, mean_seconds_between=60.0)
    first, again = (compare(jobs, [policy], SETTINGS)[0] for _ in range(2))
    assert len(first.jobs) == 3
    assert first == again
    for result in first.jobs:
        assert result.finished_at > result.submitted_at
        assert result.slot_seconds > 0


def test_a_lone_rigid_job_takes_as_long_as_its_steps_and_one_pause() -> None:
    [result] = compare([job(at=10.0)], ["fifo"], SETTINGS)
    training = SimulatedTraining(job(), "rigid")
    atomic, accumulation = training.fixed_choice(2)
    step, sync = SMALL.step_seconds((2,), atomic)
    seconds = SMALL.steps_at(512, SMALL.epochs) * (step + accumulation * (step - sync))
    # Seen at the next decision, and stopped for the first start; epochs end on whole seconds.
    assert result.jobs[0].completion_seconds == pytest.approx(50.0 + 30.0 + seconds, abs=SMALL.epochs)
    assert result.jobs[0].num_rescales == 0


@pytest.mark.parametrize(
    ("sizes", "stays_seconds", "undone"),
    [
        ((1, 2, 1), 60.0, 0),
        ((1, 2, 1), 4.0, 1),
        ((2, 1, 2), 4.0, 1),
        ((1, 2, 4), 4.0, 0),
        ((1, 4, 2), 4.0, 0),
        ((2, 0, 2), 2.0, 1),
        ((2, 0, 2), 60.0, 0),
        ((1, 2, 1, 2), 4.0, 2),
    ],
)
def test_a_change_that_is_taken_back_before_it_pays_is_counted(
    sizes: tuple[int, ...], stays_seconds: float, undone: int
) -> None:
    training = SimulatedTraining(job(), "elastic")
    now = 0.0
    for size in sizes:
        training.place({"n0": size} if size else {}, 3.0, now)
        training.advance(now, stays_seconds)
        now += stays_seconds
    assert training.finished_at is None
    assert training.num_undone == undone


@pytest.mark.slow
def test_more_information_helps_elastic_beats_rigid_and_none_exceeds_the_cluster() -> None:
    jobs = synthetic_workload(12, seed=5, mean_seconds_between=60.0)
    mean = {}
    for name, information in (("goodput", "pooled"), ("goodput", "own"), ("tiresias", "own")):
        [result] = compare(jobs, [name], SETTINGS, information)  # type: ignore[arg-type]  # literals in a tuple
        mean[name, information] = np.mean([each.completion_seconds for each in result.jobs])
        assert result.allocations
        for _, held in result.allocations:
            used = Counter[str]()
            for placement in held.values():
                used.update(placement)
            assert all(count <= SETTINGS.slots_per_node for count in used.values())
    assert mean["goodput", "pooled"] < mean["goodput", "own"] < mean["tiresias", "own"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("name,time,application,num_replicas\n", "no column 'batch_size'"),
        ("name,time,application,num_replicas,batch_size\na,-1,app,1,1\n", "line 2: time is -1; it must be at least 0"),
        ("name,time,application,num_replicas,batch_size\na,nan,app,1,1\n", "line 2: time is nan"),
        (
            "name,time,application,num_replicas,batch_size\na,0,app,many,1\n",
            "num_replicas is 'many'; it must be a number",
        ),
        ("name,time,application,num_replicas,batch_size\na,0,other,1,1\n", "no measurements of application 'other'"),
        ("name,time,application,num_replicas,batch_size\na,0,app,1,1\na,1,app,1,1\n", "names job 'a' twice"),
    ],
)
def test_a_workload_that_cannot_be_used_is_refused_in_one_sentence(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "w.csv").write_text(text)
    traces = tmp_path / "traces"
    write_measurements(traces / "cifar10")
    (traces / "app").mkdir()
    for name in ("placements.csv", "scalability.csv", "validation-100.csv", "validation-200.csv"):
        (traces / "app" / name).write_bytes((traces / "cifar10" / name).read_bytes())
    with pytest.raises(InvalidWorkload, match=message) as refused:
        read_workload(tmp_path / "w.csv", traces)
    assert "\n" not in str(refused.value)


def write_measurements(folder: Path) -> None:
    """Tables as the published ones, of a job whose step takes 1 s a replica at 100 examples, 2 s at 200."""
    folder.mkdir(parents=True)
    (folder / "placements.csv").write_text(
        "placement,local_bsz,step_time,sync_time\n1,100,1.0,0.0\n1,200,2.0,0.0\n2,100,1.5,0.5\n2,200,2.5,0.5\n"
    )
    (folder / "scalability.csv").write_text(
        "num_nodes,num_replicas,local_bsz,step_time,sync_time\n2,4,100,2.0,1.0\n2,4,200,3.0,1.0\n4,4,100,2.2,1.2\n"
        "3,6,100,2.4,1.4\n"
    )
    for batch in (100, 200):
        lines = [f"{100.0 * (epoch + 1)},{100 * (epoch + 1)},0.5,1.0,{epoch + 1.0}" for epoch in range(100)]
        (folder / f"validation-{batch}.csv").write_text(
            "progress,iteration,metric,grad_sqr,grad_var\n" + "\n".join(lines) + "\n"
        )


def test_measurements_are_interpolated(tmp_path: Path) -> None:
    write_measurements(tmp_path / "cifar10")
    application = measured_application(tmp_path / "cifar10")
    assert application.step_seconds((1,), 150) == (1.5, 0.0)
    assert application.step_seconds((2,), 150) == (2.0, 0.5)
    assert application.statistics(150, 9).var == 10.0
    assert application.bounds.init_batch == 100
    assert application.bounds.max_batch == 200
    assert list(application.epoch_ends[:3]) == [0.0, 100.0, 200.0]


def test_the_command_prints_a_table_and_writes_files(tmp_path: Path) -> None:
    arguments = ["simulate", "--jobs", "2", "--policy", "goodput", "--policy", "fifo", "--nodes", "2"]
    arguments += ["--json", str(tmp_path / "s.json"), "--picture", str(tmp_path / "s.png")]
    shown = CliRunner().invoke(command_line, arguments, catch_exceptions=False)
    assert shown.exit_code == 0
    assert "goodput" in shown.output and "fifo" in shown.output
    [first, second] = json.loads((tmp_path / "s.json").read_text())
    assert first["policy"] == "goodput" and len(first["completions"]) == 2
    assert second["mean_completion"] > 0
    told = CliRunner().invoke(
        command_line, [*arguments, "--why", first["completions"][0]["name"]], catch_exceptions=False
    )
    assert f"{first['completions'][0]['name']} under fifo" in told.output
    assert "starting: starts on" in told.output
    with pytest.raises(ValueError, match="no job is called 'nobody'; some that are"):
        CliRunner().invoke(command_line, [*arguments, "--why", "nobody"], catch_exceptions=False)
    assert 0.0 <= first["undone"] < 1.0 and second["undone"] == 0.0 and "undone" in shown.output
    assert (tmp_path / "s.png").read_bytes().startswith(b"\x89PNG")


PUBLISHED = {"tiresias": (2473.7, 5145.0, 3876.3, 3280.3), "optimus": (4087.1, 6913.9, 3944.0, 5967.8)}
"""Average completion times in seconds on workloads 1 to 4, 16 nodes with 4 GPUs (artifact of Pollux, OSDI'21)."""


@pytest.mark.slow
@pytest.mark.skipif("ELASTUNE_POLLUX_TRACES" not in os.environ, reason="names the folder of Pollux's measurements")
@pytest.mark.parametrize("policy", sorted(PUBLISHED))
def test_published_averages_come_out(policy: str) -> None:
    traces = Path(os.environ["ELASTUNE_POLLUX_TRACES"])
    for number, published in enumerate(PUBLISHED[policy], start=1):
        jobs = read_workload(traces / "workloads" / f"workload-{number}.csv", traces)
        [result] = compare(jobs, [policy], SimulationSettings())
        mean = np.mean([each.completion_seconds for each in result.jobs])
        assert mean == pytest.approx(published, rel=0.02)


@pytest.mark.slow
def test_a_sweep_stops_at_rungs_and_says_when_its_best_was_done() -> None:
    curves = learning_curves(18, SMALL.epochs, seed=1)
    sweep = SweepSettings(max_replicas=4, at_a_time=8, rungs=(3, 10))
    settings = SimulationSettings(nodes=2, slots_per_node=4, decide_every_seconds=15.0)
    results = {}
    for name in ("goodput", "asha_static"):
        bounds = replace(sweep, min_replicas=1, max_replicas=1 if name == "asha_static" else 4)
        results[name] = SweepWorld(curves, SMALL, compared_policy(name), settings, bounds).sweep()
    for result in results.values():
        assert 1 <= result.finished < 18
        assert result.best_finished_seconds <= result.makespan_seconds
        assert result.score_at(result.makespan_seconds) >= result.best_value
        assert result.score_at(-1.0) == float("-inf")
    assert results["goodput"].makespan_seconds < results["asha_static"].makespan_seconds


def test_halving_keeps_the_best_third() -> None:
    halving = SuccessiveHalving((2,), 3)
    assert [halving.keeps(2, value) for value in (0.5, 0.4, 0.6, 0.1, 0.45)] == [True, False, True, False, False]
    assert halving.keeps(1, 0.0)


def test_learning_curves_can_be_told_apart_early_but_not_surely() -> None:
    curves = learning_curves(300, 50, seed=0)
    assert curves.shape == (300, 50)
    ranks = [np.argsort(np.argsort(curves[:, epoch])) for epoch in (4, 49)]
    assert 0.6 < np.corrcoef(ranks[0], ranks[1])[0, 1] < 0.95


@pytest.mark.parametrize(
    "timing", [pytest.param(None, id="at intervals"), pytest.param(LIVE, id="live", marks=pytest.mark.slow)]
)
def test_the_result_does_not_depend_on_how_fast_the_machine_is(
    monkeypatch: pytest.MonkeyPatch, timing: Timing | None
) -> None:
    """A machine that is held up, or slow, or busy, sees other real times: none of them may count."""
    submissions = synthetic_workload(2, seed=1, mean_seconds_between=60.0)
    every = 0.0 if timing else 60.0
    settings = SimulationSettings(nodes=2, slots_per_node=2, timing=timing, decide_every_seconds=every)

    def simulated() -> list[tuple[str, float, int]]:
        result = World(submissions, compared_policy("goodput"), settings).run()
        return [(job.name, job.finished_at, job.num_rescales) for job in result.jobs]

    expected = simulated()
    real = itertools.count()
    for name in ("time", "monotonic", "perf_counter", "thread_time"):
        monkeypatch.setattr(time, name, lambda: 0.8 * next(real))
    defaults = ControlLoop.__init__.__kwdefaults__
    assert defaults is not None
    for clock in ("clock", "monotonic"):
        monkeypatch.setitem(defaults, clock, lambda: 0.8 * next(real))
    assert simulated() == expected


def test_trials_whose_replicas_take_several_slots_are_simulated_in_whole_ones() -> None:
    curves = learning_curves(8, SMALL.epochs, seed=1)
    settings = SimulationSettings(nodes=2, slots_per_node=4, decide_every_seconds=60.0, rescale_seconds=30.0)
    results = {}
    for size in (1, 2):
        sweep = SweepSettings(max_replicas=4, at_a_time=8 // size, rungs=(), slots_per_replica=size)
        world = SweepWorld(curves, SMALL, compared_policy("goodput"), settings, sweep)
        results[size] = world.sweep()
        held = [placement for _, jobs in world._allocations for placement in jobs.values()]
        assert all(count % size == 0 for placement in held for count in placement.values())
        assert results[size].finished == 8
    # Twice the slots for each replica, which is as fast: the sweep takes about twice as long.
    assert 1.4 < results[2].makespan_seconds / results[1].makespan_seconds < 2.6


@pytest.mark.parametrize(
    ("placement", "size", "replicas"),
    [({"a": 4, "b": 2}, 1, (4, 2)), ({"a": 4, "b": 2}, 2, (2, 1)), ({"a": 4, "b": 4}, 8, (1,)), ({}, 2, ())],
)
def test_replicas_of_several_slots_are_counted_by_node(
    placement: dict[str, int], size: int, replicas: tuple[int, ...]
) -> None:
    assert shares_on(placement, size) == replicas
