"""StepTimes: how long the passes of one loader's steps took, and what the throughput model learns of them.

A GPU is behind what it was given, by as much as a step or two: times are read once it has come that far, in the order
of the steps, and nobody waits for them.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass

from dist_core.data.order import StepPlan
from dist_core.device import HOST, Device, Elapsed, Mark, known_seconds
from dist_core.goodput import Configuration
from dist_core.torch_private import compiled_graphs
from dist_core.trial.replica import Replica

MOST_WAITING = 64
"""Steps whose times are awaited; a device that is further behind is waited for."""


@dataclass(frozen=True, slots=True)
class _Step:
    configuration: Configuration
    generation: int
    ended: float
    """Time of the end, by the host's monotonic clock."""
    passes: list[Elapsed]
    reductions: list[Elapsed]
    """Times from each model's last bucket to the end of its reduction."""
    is_split: bool
    """One replica's batch that is trained in parts, to measure the noise of its gradient."""

    @property
    def is_known(self) -> bool:
        return all(each.is_known for each in (*self.passes, *self.reductions))

    def wait(self) -> None:
        for each in (*self.passes, *self.reductions):
            each.end.wait()


class StepTimes:
    def __init__(self, core: Replica) -> None:
        self._core = core
        self._waiting: deque[_Step] = deque()
        self._passes: list[Elapsed] = []
        self._device: Device = HOST
        self._mark: Mark = HOST.mark()
        self._began = 0.0

    def begin_step(self) -> None:
        self._passes = []
        models = self._core.models
        self._device = models[0].device_of_gradients if len(models) else HOST
        self._begin_pass()

    def _begin_pass(self) -> None:
        self._began = time.perf_counter()
        self._mark = self._device.mark()

    def end_pass(self, step: StepPlan, index: int) -> None:
        """End the body's run for this micro-batch; what comes next is the following pass."""
        emulated = self._core.emulated_device
        if emulated is None:
            self._passes.append(Elapsed(self._mark, self._device.mark()))
        else:
            reduces = index == len(step.micro_batches) - 1
            group, size = self._core.generation.group, len(step.micro_batches[index])
            seconds = emulated.pass_seconds(group.num_nodes, group.num_shares, size, reduces=reduces)
            seconds *= self._core.layout.seconds
            self._passes.append(known_seconds(emulated.hold(self._began, seconds)))
        self._begin_pass()

    def note(self, step: StepPlan, *, measures: bool) -> None:
        """Record a step's times once they are known."""
        core = self._core
        assert core.adaptation is not None
        group = core.generation.group
        atomic = len(step.micro_batches[-1])
        reductions = [model.reduction for model in core.models]
        self._waiting.append(
            _Step(
                configuration=Configuration(
                    group.num_nodes, group.num_shares, atomic, core.adaptation.node_kind, core.adaptation.layout
                ),
                generation=core.generation.number,
                ended=time.monotonic(),
                passes=self._passes,
                reductions=[each for each in reductions if each is not None],
                is_split=measures and group.num_replicas == 1,
            )
        )
        if len(self._waiting) > MOST_WAITING:
            self._waiting[0].wait()
        while self._waiting and self._waiting[0].is_known:
            self._learn(self._waiting.popleft())

    def _learn(self, step: _Step) -> None:
        """Feed the throughput model: the last pass is the one that reduces, the ones before only compute."""
        adaptation, emulated = self._core.adaptation, self._core.emulated_device
        assert adaptation is not None
        atomic = step.configuration.atomic_batch
        seconds = [each.seconds for each in step.passes]
        adaptation.size_costs.note(
            atomic, max(seconds), step.ended, generation=step.generation, compiles=compiled_graphs() > 0
        )
        if step.is_split:
            return
        sync = max((max(0.0, each.seconds) for each in step.reductions), default=0.0)
        optim = seconds[-1]
        gradient = sum(seconds[:-1]) / len(seconds[:-1]) if len(seconds) > 1 else max(optim - sync, 0.1 * optim)
        if emulated is not None:
            # What this machine took to reduce them says nothing.
            gradient = emulated.gradient_seconds(atomic)
        adaptation.timed(step.configuration, gradient_seconds=min(gradient, optim), optim_seconds=optim)
