"""StepTimes: how long the passes of a step took, and what the throughput model learns of them."""

from __future__ import annotations

import time

from dist_core.data.order import StepPlan
from dist_core.goodput import Configuration
from dist_core.torch_private import compiled_graphs
from dist_core.trial.core import TrainingCore


def seconds_since(core: TrainingCore, step: StepPlan, index: int, began: float) -> float:
    """How long a pass took; on a device that is emulated, as long as there."""
    device = core.emulated_device
    if device is None:
        return time.perf_counter() - began
    reduces = index == len(step.micro_batches) - 1
    group, size = core.generation.group, len(step.micro_batches[index])
    return device.hold(began, device.pass_seconds(group.num_nodes, group.world_size, size, reduces=reduces))


def note_times(core: TrainingCore, step: StepPlan, seconds: list[float], *, measures: bool) -> None:
    """Feed the throughput model: the last pass is the one that reduces, the ones before only compute."""
    assert core.adaptation is not None
    world_size = core.generation.group.world_size
    atomic = len(step.micro_batches[-1])
    core.adaptation.size_costs.note(
        atomic, max(seconds), time.monotonic(), generation=core.generation.number, compiles=compiled_graphs() > 0
    )
    if measures and world_size == 1:
        return
    configuration = Configuration(core.generation.group.num_nodes, world_size, atomic, core.adaptation.node_kind)
    sync = max((model.sync_seconds for model in core.models), default=0.0)
    optim = seconds[-1]
    gradient = sum(seconds[:-1]) / len(seconds[:-1]) if len(seconds) > 1 else max(optim - sync, 0.1 * optim)
    if core.emulated_device is not None:
        # What this machine took to reduce them says nothing.
        gradient = core.emulated_device.gradient_seconds(atomic)
    core.adaptation.timed(configuration, gradient_seconds=min(gradient, optim), optim_seconds=optim)
