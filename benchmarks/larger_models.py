"""Models over several slots: what stages wait, what the cut is worth, what a process holds, what a resize costs.

Stages sleep for as long as they would compute, so that several of them run at once on two cores. Peers: the formula of
a pipeline's bubble (GPipe, section 2.3), cuts into equal counts of blocks, the whole model on one process.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import nn
from torch.distributed.pipelining import PipelineStage

from benchmarks.decision_time import snapshot
from benchmarks.frame import Measurement
from benchmarks.mixed_sizes import fewest_slots, mixed_sizes, most_slots
from benchmarks.ranks import run_ranks
from dist_core.larger.pipeline import ElasticPipeline
from dist_core.larger.sharded import ElasticFullyShard
from dist_core.layout import Layout
from dist_core.partition.balance import PipelineTerms, partition
from dist_core.partition.blocks import BlockCosts, StageDevice
from dist_core.partition.explain import bubble
from dist_core.state.parts import local_of
from scheduler.knowledge.profile import TrialModel
from scheduler.policy import policy_by_name
from scheduler.simulator.cluster import SimulationSettings
from scheduler.simulator.rivals import compared_policy
from scheduler.simulator.world import World
from scheduler.snapshot import LayoutOption, Snapshot, TrialView
from tests.support.rig import PRELOAD, Rig
from trials.launch import LocalLauncher

STEPS = 4
MICROBATCHES = 16
SECONDS = 0.2
"""Seconds of a stage's forward pass; its backward pass takes as long."""


class Sleeps(torch.autograd.Function):
    """Layer that sleeps as long as it would compute, and as long again for the gradient of its inputs."""

    @staticmethod
    def forward(context: Any, x: torch.Tensor, forwards: float, backwards: float) -> torch.Tensor:
        context.seconds = backwards
        time.sleep(forwards)
        return x.clone()

    @staticmethod
    def backward(context: Any, *gradients: torch.Tensor) -> Any:
        time.sleep(context.seconds)
        return gradients[0], None, None


class Sleeper(nn.Module):
    """Half of its backward pass is the gradient of its weights."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds
        self.linear = nn.Linear(8, 8)
        # So that the first one has a gradient of its inputs to compute too.
        self.shift = nn.Parameter(torch.zeros(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = Sleeps.apply(self.linear.weight, 0.0, self.seconds / 2)
        inputs = Sleeps.apply(x + self.shift, self.seconds, self.seconds / 2)
        return nn.functional.linear(inputs, weight, self.linear.bias)


@contextmanager
def busy_time() -> Iterator[list[float]]:
    """Measure this process's time in passes through its stages.

    What torch and autograd do around a sleep is work too.
    """
    spent = [0.0]

    def timed(original: Callable[..., Any]) -> Callable[..., Any]:
        def pass_of_a_microbatch(*args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter()
            try:
                return original(*args, **kwargs)
            finally:
                spent[0] += time.perf_counter() - began

        return pass_of_a_microbatch

    names = ("forward_one_chunk", "backward_one_chunk", "backward_weight_one_chunk")
    with ExitStack() as stack:
        for name in names:
            stack.enter_context(mock.patch.object(PipelineStage, name, timed(getattr(PipelineStage, name))))
        yield spent


def stepped(
    rank: int, world_size: int, seconds: list[float], cuts: list[int], schedule: str, chunks: int
) -> tuple[float, float]:
    """Median time of a step of 16 microbatches, and how much of it a process computes, on average."""
    os.environ["ELASTUNE_MEMBERS"] = str(world_size)
    torch.manual_seed(0)
    model = nn.Sequential(*map(Sleeper, seconds))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    wrapped = ElasticPipeline(
        model,
        optimizer,
        nn.functional.mse_loss,
        cuts=[str(cut) for cut in cuts],
        schedule=schedule,
        chunks=chunks,
        microbatches=MICROBATCHES,
    )
    x = torch.randn(MICROBATCHES, 8)
    times, busy = [], []
    for _ in range(STEPS):
        with busy_time() as spent:
            began = time.perf_counter()
            wrapped.step(x, x)
            times.append(time.perf_counter() - began)
        busy.append(spent[0])
    summed = torch.tensor([statistics.median(busy[1:])])
    torch.distributed.all_reduce(summed)
    return statistics.median(times[1:]), float(summed) / world_size


def waits() -> list[Measurement]:
    rows = []
    stages = 4
    ideal = MICROBATCHES * 2 * SECONDS
    for schedule, chunks in (("1f1b", 1), ("interleaved", 2)):
        blocks = stages * chunks
        seconds = [SECONDS / chunks] * blocks
        took, busy = run_ranks(stepped, stages, seconds, list(range(1, blocks)), schedule, chunks)
        waited = 1.0 - busy / took
        # Each round of the pipeline is filled and drained in parts of a stage.
        expected = bubble(stages, MICROBATCHES, chunks)
        rows.append(
            Measurement(
                what=f"part of a step that stages wait, {schedule}",
                ours=waited,
                peer=expected,
                unit="of the step",
                peer_name="the formula",
                target=1.05 if chunks == 1 else 1.1,
                details={
                    "step_seconds": took,
                    "busy_seconds": busy,
                    "slept_seconds": ideal,
                    "waited_or_not_slept": 1.0 - ideal / took,
                },
            )
        )
    return rows


def uneven() -> Measurement:
    """A model whose last blocks are the heavy ones."""
    seconds = [0.008] * 6 + [0.024] * 2
    blocks = [
        BlockCosts(name=str(index), forward_seconds=each, backward_seconds=each) for index, each in enumerate(seconds)
    ]
    cuts = partition(blocks, [StageDevice()] * 2, PipelineTerms(microbatches=MICROBATCHES)).cuts
    equal, _ = run_ranks(stepped, 2, seconds, [4], "1f1b", 1)
    found, _ = run_ranks(stepped, 2, seconds, [int(each) for each in cuts], "1f1b", 1)
    return Measurement(
        what="examples a second of an uneven model, cut where stages are most alike",
        ours=MICROBATCHES / found,
        peer=MICROBATCHES / equal,
        unit="examples/s",
        peer_name="equal counts of blocks",
        lower_is_better=False,
        target=1.2,
    )


def held(rank: int, world_size: int) -> list[int]:
    """Bytes of weights and optimizer state of this process, and of a whole model."""
    os.environ["ELASTUNE_MEMBERS"] = str(world_size)
    model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(8)))
    whole = 3 * sum(each.nbytes for each in model.parameters())
    optimizer = torch.optim.Adam(model.parameters())
    wrapped = ElasticFullyShard(model, optimizer)
    nn.functional.mse_loss(wrapped(torch.randn(4, 256)), torch.zeros(4, 256)).backward()
    optimizer.step()
    mine = sum(local_of(each).nbytes for each in model.parameters())
    state = sum(
        local_of(value).nbytes
        for values in optimizer.state.values()
        for value in values.values()
        if isinstance(value, torch.Tensor) and value.dim()
    )
    sizes = torch.tensor([mine + state])
    torch.distributed.all_reduce(sizes, op=torch.distributed.ReduceOp.MAX)
    return [int(sizes), whole]


def memory() -> Measurement:
    ours, whole = run_ranks(held, 4)
    return Measurement(
        what="weights and optimizer state of the process that holds most, of 4",
        ours=ours / 2**20,
        peer=whole / 2**20,
        unit="MiB",
        peer_name="the whole model's",
        target=0.3,
    )


def resize() -> Measurement:
    """A replica of two joins one of two, with 120 MB of state in all; what the survivors spend on it."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        rig = Rig(Path(folder))
        try:
            trial_id = rig.submit(
                1, entrypoint="benchmarks.larger_training:main", slots_per_replica=2, EPOCHS="60", STEP_SECONDS="0.02"
            )
            rig.until_size(trial_id, 2)
            for slots in (4, 2, 4, 2, 4):
                rig.want(trial_id, slots)
                rig.until_size(trial_id, slots)
                rig.until_step(rig.latest_step() + 5)
            rig.want(trial_id, 0)
            found = [pause for row in rig.rows() for pause in row["pauses"]]
        finally:
            rig.close()
    return Measurement(
        what="pause of survivors when whole replicas join and leave, 120 MB",
        ours=1e3 * statistics.median(found),
        peer=100.0,
        unit="ms",
        peer_name="the goal",
        target=1.0,
        details={"pauses_ms": sorted({round(1e3 * each, 2) for each in found})},
    )


def reshape() -> Measurement:
    """Sharded over two slots, then over four, and back: between the last step with one and the first with the other."""
    launcher = LocalLauncher(slots=4, preload=(*PRELOAD, "dist_core.larger.model"))
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        rig = Rig(Path(folder), launcher=launcher)
        try:
            trial_id = rig.submit(
                1,
                entrypoint="benchmarks.larger_training:main",
                replica_sizes=(2, 4),
                layout="2 sharded",
                EPOCHS="60",
                STEP_SECONDS="0.02",
            )
            rig.want(trial_id, 2)
            rig.until_size(trial_id, 2)
            for slots in (4, 2, 4, 2):
                rig.until_step(rig.latest_step() + 10)
                rig.want(trial_id, slots, f"{slots} sharded")
                rig.until(lambda: rig.trial(trial_id).slots_per_replica == slots, "the layout")  # noqa: B023
                rig.until_size(trial_id, slots)
                rig.until_step(rig.latest_step() + 5)
            rig.want(trial_id, 0)
            rows = sorted(rig.rows(), key=lambda row: row["at"])
        finally:
            rig.close()
            launcher.close()
    # A row is written when a step has been made; the first one's own time is no pause.
    times: dict[tuple[int, str], list[float]] = {}
    for row in rows:
        times.setdefault((row["slots"], row["replica"]), []).append(row["at"])
    step = {
        size: statistics.median([float(each) for key, at in times.items() if key[0] == size for each in np.diff(at)])
        for size in (2, 4)
    }
    gaps = [
        later["at"] - row["at"] - step[later["slots"]]
        for row, later in pairwise(rows)
        if row["slots"] != later["slots"]
    ]
    return Measurement(
        what="pause of a trial that goes on sharded over another number of slots, 120 MB",
        ours=1e3 * statistics.median(gaps),
        peer=1000.0,
        unit="ms",
        peer_name="the goal",
        target=1.0,
        details={"pauses_ms": sorted(round(1e3 * each) for each in gaps)},
    )


def planner() -> Measurement:
    """200 trials on 64 slots that want 1, 2 or 4 slots at least: as one replica, or as many."""
    seen = snapshot(200, 8, 8)
    sizes = [(1, 2, 4)[index % 3] for index in range(200)]
    views = [
        replace(view, min_slots=size, placement={}, can_rescale=False)
        for view, size in zip(seen.trials, sizes, strict=True)
    ]
    plain = replace(seen, trials=tuple(views))
    whole = [replace(view, slots_per_replica=size) for view, size in zip(views, sizes, strict=True)]
    mixed = replace(seen, trials=tuple(whole))
    ours, peer = decision_times(mixed, plain)
    return Measurement(
        what="one decision on 200 trials and 64 slots, replicas of 1, 2 and 4 slots",
        ours=ours,
        peer=peer,
        unit="ms",
        peer_name="as many replicas of one slot",
        target=2.0,
    )


def decision_times(*snapshots: Snapshot) -> list[float]:
    """Milliseconds of a decision on each, taken in turns."""
    policy = compared_policy("goodput")
    times: list[list[float]] = [[] for _ in snapshots]
    for _ in range(9):
        for seen, found in zip(snapshots, times, strict=True):
            began = time.perf_counter()
            policy.allocate(seen)
            found.append(1e3 * (time.perf_counter() - began))
    return [statistics.median(found) for found in times]


LAYOUTS = ("1", "2 sharded", "2 stages", "4 sharded", "4 stages", "4 stages recomputed")


def planner_of_layouts() -> Measurement:
    """200 trials on 64 slots, each with six layouts to choose from."""
    seen = snapshot(200, 8, 8)
    several = [with_layouts(view) for view in seen.trials]
    ours, peer = decision_times(replace(seen, trials=tuple(several)), seen)
    return Measurement(
        what="one decision on 200 trials and 64 slots, six layouts each",
        ours=ours,
        peer=peer,
        unit="ms",
        peer_name="one layout each",
        target=2.0,
    )


def with_layouts(view: TrialView) -> TrialView:
    assert isinstance(view.model, TrialModel)
    options = []
    for index, layout in enumerate(map(Layout.from_name, LAYOUTS)):
        model = replace(view.model.slower(1.0 + 0.1 * index), slots_per_share=layout.slots_per_share)
        options.append(
            LayoutOption(
                layout=str(layout),
                slots_per_replica=layout.slots,
                min_slots=layout.slots,
                max_slots=16 * layout.slots,
                model=model,
            )
        )
    held = LAYOUTS[0] if view.held_slots else ""
    return replace(view, layout=held, options=tuple(options), max_slots=64, model=options[0].model)


def choice() -> list[Measurement]:
    """60 simulated jobs of models for one, two and four slots, on four nodes of four; mean completion time."""
    settings = SimulationSettings(nodes=4, slots_per_node=4)
    rows = []
    for name, fixed in (("as few slots as it fits on", fewest_slots), ("four slots for all", most_slots)):
        times: dict[str, list[float]] = {"chosen": [], "fixed": []}
        for seed in range(3):
            jobs = mixed_sizes(60, seed=seed)
            for kind, submitted in (("chosen", jobs), ("fixed", [fixed(each) for each in jobs])):
                result = World(submitted, policy_by_name("goodput"), settings).run()
                times[kind].append(statistics.mean(job.completion_seconds for job in result.jobs))
        rows.append(
            Measurement(
                what="mean completion time where the scheduler chooses layouts, simulated",
                ours=statistics.median(times["chosen"]),
                peer=statistics.median(times["fixed"]),
                unit="s",
                peer_name=f"fixed: {name}",
                target=1.0,
                details=times,
            )
        )
    return rows


def measure() -> list[Measurement]:
    return [*waits(), uneven(), memory(), resize(), reshape(), planner(), planner_of_layouts(), *choice()]
