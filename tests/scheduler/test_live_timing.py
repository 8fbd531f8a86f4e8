"""The simulator with the timing of a live scheduler: from event to event, with replicas that take their time."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from click.testing import CliRunner

from dist_core.goodput import BatchBounds, ThroughputParams
from dist_core.gradients.noise.estimator import is_measured
from scheduler.cli import command_line
from scheduler.policy import policy_by_name
from scheduler.simulator.application import ModelledApplication
from scheduler.simulator.cluster import SimulationSettings
from scheduler.simulator.command import compare
from scheduler.simulator.replicas import Timing
from scheduler.simulator.sweep import SweepSettings, SweepWorld, learning_curves
from scheduler.simulator.workload import Submission, synthetic_workload
from scheduler.simulator.world import World

TIMING = Timing(start=0.25, leave=0.125, successor=0.5)
LIVE = SimulationSettings(nodes=1, slots_per_node=1, decide_every_seconds=0.0, rescale_seconds=0.0625, timing=TIMING)
STEP = 0.1
EPOCHS, STEPS = 3, 40
LINEAR = ModelledApplication(
    name="linear",
    bounds=BatchBounds(init_batch=64, max_batch=256, min_atomic=16, max_atomic=64, accumulation=False),
    params=ThroughputParams(
        alpha_c=0.02, beta_c=(STEP - 0.02) / 64, alpha_n=0.01, beta_n=0.0, alpha_r=0.005, beta_r=0.0, gamma=1.0
    ),
    epochs=EPOCHS,
    steps_per_epoch=STEPS,
)


def job(number: int = 0, at: float = 0.0, most: int = 1) -> Submission:
    return Submission(name=str(number), at=at, application=LINEAR, num_replicas=1, batch_size=64, max_replicas=most)


def seconds_of_training() -> float:
    """A split step takes two passes of half its examples: the time of one pass's overhead more."""
    split = sum(is_measured(step, num_replicas=1, every=None) for step in range(EPOCHS * STEPS))
    return EPOCHS * STEPS * STEP + split * LINEAR.params.alpha_c


def test_a_trial_takes_its_start_and_its_steps_to_the_millisecond() -> None:
    [result] = compare([job(at=7.3)], ["goodput"], LIVE)
    [done] = result.jobs
    assert done.completion_seconds == pytest.approx(0.25 + 0.0625 + seconds_of_training(), abs=1e-3)


def test_the_next_trial_starts_when_the_slot_is_free() -> None:
    [result] = compare([job(0), job(1, at=1.0)], ["goodput"], LIVE)
    first, second = result.jobs
    assert second.finished_at - first.finished_at == pytest.approx(
        0.125 + 0.25 + 0.0625 + seconds_of_training(), abs=1e-3
    )


def test_a_sweeps_next_trial_comes_when_its_tuner_has_heard_of_an_end() -> None:
    curves = np.full((4, EPOCHS), 0.5)
    sweep = SweepSettings(max_replicas=1, at_a_time=1, rungs=())
    result = SweepWorld(curves, LINEAR, policy_by_name("goodput"), LIVE, sweep).sweep()
    each = 0.25 + 0.0625 + seconds_of_training()
    assert result.makespan_seconds == pytest.approx(4 * each + 3 * 0.5, abs=0.01)


def test_a_trial_grows_between_two_steps_and_pauses_for_it() -> None:
    settings = SimulationSettings(
        nodes=1, slots_per_node=4, decide_every_seconds=0.0, rescale_seconds=0.0625, timing=TIMING
    )
    world = World([job(most=4)], policy_by_name("goodput"), settings)
    result = world.run()
    (start, _), (grown, held), *_ = result.allocations
    assert start == pytest.approx(0.25)
    assert sum(held["0"].values()) > 1
    # It is left alone until a step was timed, whose news takes a moment; joiners take as long to start as it did.
    assert 0.25 + STEP + 0.25 <= grown <= 0.25 + STEP + 0.25 + 0.5
    assert result.jobs[0].completion_seconds < 0.25 + seconds_of_training()


@pytest.mark.parametrize("policy", ["goodput", "tiresias"])
def test_every_policy_finishes_a_workload_the_same_way_twice(policy: str) -> None:
    jobs = synthetic_workload(4, seed=3, mean_seconds_between=60.0)
    settings = SimulationSettings(
        nodes=2, slots_per_node=4, decide_every_seconds=120.0, rescale_seconds=0.05, timing=TIMING
    )
    first, again = (compare(jobs, [policy], settings)[0] for _ in range(2))
    assert len(first.jobs) == 4
    assert first == again


def test_slots_that_wait_for_a_start_or_an_end_are_never_held_twice() -> None:
    sweep = SweepSettings(max_replicas=4, at_a_time=6, goal="time_to_best", rungs=(1,))
    settings = SimulationSettings(
        nodes=2, slots_per_node=2, decide_every_seconds=0.0, rescale_seconds=0.05, timing=TIMING
    )
    world = SweepWorld(learning_curves(12, EPOCHS, seed=1), LINEAR, policy_by_name("goodput"), settings, sweep)
    result = world.run()
    assert len(result.jobs) == 12
    held: dict[tuple[str, int], list[tuple[float, float]]] = {}
    for interval in world.store.slot_intervals():
        # The last trial's replicas may still be leaving when the simulation ends.
        ended = math.inf if interval.ended is None else interval.ended
        held.setdefault((interval.node, interval.slot), []).append((interval.began, ended))
    assert len(held) == 4
    for times in held.values():
        times.sort()
        assert all(before[1] <= after[0] for before, after in itertools.pairwise(times))


def test_the_command_simulates_a_live_scheduler() -> None:
    done = CliRunner().invoke(
        command_line, ["simulate", "--sweep", "4", "--nodes", "1", "--live", "--every", "60", "--policy", "goodput"]
    )
    assert done.exit_code == 0, done.output
    assert "goodput" in done.output
