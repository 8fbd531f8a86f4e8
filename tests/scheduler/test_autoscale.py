"""How many nodes are worth their price."""

from __future__ import annotations

from dataclasses import replace

from scheduler.allocation.autoscale import Autoscaler, AutoscaleSettings, desired_nodes
from scheduler.policy import policy_by_name
from scheduler.simulator.cluster import SimulationSettings
from scheduler.simulator.workload import LARGE, SMALL, Submission
from scheduler.simulator.world import World
from tests.support.views import model, running, snapshot, waiting

SETTINGS = AutoscaleSettings(slots=4, price_per_hour=1.0, most_nodes=8, worth_of_an_hour=4.0)


def test_nobody_needs_nodes_when_nothing_is_to_do() -> None:
    assert desired_nodes(snapshot(), SETTINGS) == 0
    assert desired_nodes(snapshot(), replace(SETTINGS, least_nodes=2)) == 2


def test_each_waiting_trial_is_worth_a_slot() -> None:
    for trials, nodes in ((1, 1), (8, 2), (40, 8)):
        seen = snapshot(*(waiting(f"t{index}") for index in range(trials)))
        assert desired_nodes(seen, SETTINGS) == nodes


def test_a_trial_that_scales_gets_more_nodes_than_one_that_does_not() -> None:
    scales = running("a", model=model(overhead=0.001, var=5e3, seen=16), max_slots=32)
    does_not = running("a", model=model(overhead=5.0, seen=16), max_slots=32)
    assert desired_nodes(snapshot(scales), SETTINGS) > desired_nodes(snapshot(does_not), SETTINGS) == 1


def test_the_more_an_hour_is_worth_the_more_nodes() -> None:
    trial = snapshot(running("a", model=model(overhead=0.05, var=500.0, seen=16), max_slots=32))
    found = [desired_nodes(trial, replace(SETTINGS, worth_of_an_hour=worth)) for worth in (0.0, 1.0, 10.0, 1e4)]
    assert found == sorted(found)
    assert found[0] < found[-1]


def test_nodes_go_only_after_they_were_not_wanted_for_a_while() -> None:
    scaler = Autoscaler(replace(SETTINGS, shrink_after_seconds=300.0))
    busy, idle = snapshot(*(waiting(f"t{index}") for index in range(8))), snapshot(waiting("t0"))
    assert scaler.decide(busy, 0, 0.0) == 2
    assert scaler.decide(idle, 2, 10.0) == 2
    assert scaler.decide(busy, 2, 200.0) == 2
    assert scaler.decide(idle, 2, 400.0) == 2
    assert scaler.decide(idle, 2, 701.0) == 1


def test_a_simulated_cluster_follows_its_jobs() -> None:
    jobs = [
        Submission(name=f"j{index}", at=600.0 * index, application=kind, num_replicas=1, batch_size=512)
        for index, kind in enumerate((SMALL, SMALL, LARGE))
    ]
    autoscale = replace(SETTINGS, least_nodes=1, most_nodes=6)
    result = World(jobs, policy_by_name("goodput"), SimulationSettings(autoscale=autoscale)).run()
    assert len(result.jobs) == 3
    assert result.node_hours < 6 * result.makespan_seconds / 3600.0
    nodes_used = {len({node for held in at.values() for node in held}) for _, at in result.allocations}
    assert len(nodes_used) > 1
