"""One long job on a cluster that grows and shrinks: what goodput saves against scaling by throughput.

As in Pollux's own experiment (OSDI'21, section 5.3.3): ResNet-50 on ImageNet, up to 16 nodes with 4 slots. The
peer scales by throughput and trains with the batch that is fastest (Or et al., MLSys'20). There goodput was 25% cheaper
and took 6% longer. ELASTUNE_POLLUX_TRACES names the folder with the paper's measurements.
"""

from __future__ import annotations

import logging
import os
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

from benchmarks.frame import Measurement
from dist_core.goodput import GradientStatistics, Hints
from scheduler.allocation.autoscale import AutoscaleSettings
from scheduler.policy import policy_by_name
from scheduler.simulator import world
from scheduler.simulator.application import measured_application
from scheduler.simulator.cluster import SimulationSettings
from scheduler.simulator.training import SimulatedTraining
from scheduler.simulator.workload import Submission
from scheduler.simulator.world import SimulationResult, World

NODES = AutoscaleSettings(slots=4, price_per_hour=1.0, least_nodes=1, most_nodes=16)
WORTH = 20.0
"""Node hours that an hour sooner is worth, in the rows that have a target."""
NO_NOISE_COUNTS = GradientStatistics(sqr=1e-9, var=1.0)
"""Under which larger batches are always worth their examples: goodput becomes throughput."""


class FastestTraining(SimulatedTraining):
    """Chooses its batch size for throughput, and tells the scheduler nothing about its gradients."""

    def _choose_batch(self) -> None:
        true, self._statistics = self._statistics, NO_NOISE_COUNTS
        super()._choose_batch()
        self._statistics = true

    def hints(self, **options: Any) -> Hints:
        return replace(super().hints(**options), statistics=NO_NOISE_COUNTS)


def _run(worth: float, training: type[SimulatedTraining]) -> SimulationResult:
    traces = Path(os.environ["ELASTUNE_POLLUX_TRACES"])
    application = measured_application(traces / "imagenet")
    job = Submission(name="imagenet", at=0.0, application=application, num_replicas=4, batch_size=3200)
    settings = SimulationSettings(autoscale=replace(NODES, worth_of_an_hour=worth), rescale_seconds=30.0)
    # The job that this benchmark compares with.
    with patch.object(world, "SimulatedTraining", training):
        return World([job], policy_by_name("goodput"), settings).run()


def measure() -> list[Measurement]:
    logging.disable(logging.ERROR)
    if "ELASTUNE_POLLUX_TRACES" not in os.environ:
        print("set ELASTUNE_POLLUX_TRACES to the folder of Pollux's measurements; nothing was run")
        return []
    rows = []
    fastest = _run(WORTH, FastestTraining)
    for worth in (3.0, 10.0, 20.0, 40.0, 80.0):
        ours = _run(worth, SimulatedTraining)
        details = {"worth_of_an_hour": worth, "rescales": ours.jobs[0].num_rescales}
        rows += [
            Measurement(
                what=f"cost, an hour sooner is worth {worth:g} node hours",
                ours=ours.node_hours,
                peer=fastest.node_hours,
                unit="node hours",
                peer_name="scaling by throughput",
                target=0.75 if worth == WORTH else None,
                details=details,
            ),
            Measurement(
                what=f"time, an hour sooner is worth {worth:g} node hours",
                ours=ours.makespan_seconds / 3600.0,
                peer=fastest.makespan_seconds / 3600.0,
                unit="h",
                peer_name="scaling by throughput",
                target=1.06 if worth == WORTH else None,
                details=details,
            ),
        ]
    return rows
