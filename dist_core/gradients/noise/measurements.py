"""Measurements: the norms of one model's gradients, from a step's backward passes to the noise scale.

What a step has measured is summed over the replicas by a later step's round, so that nothing waits for it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from dist_core.device import Device, Mark, device_of
from dist_core.gradients.bucket_reducer import StepNorms
from dist_core.gradients.noise.estimator import NoiseScale, from_parts
from dist_core.gradients.noise.norms import AdamPreconditioner, squared_norm_of_all, summed


@dataclass(slots=True)
class _Measured:
    """One step's norms on their way to a round."""

    values: torch.Tensor
    """(difference, total), float64: what this replica adds to the sums."""
    arrived: Mark
    """``values`` are in the host's memory by then."""
    step: int
    num_parts: int
    """Replicas, or one replica's micro-batches, whose gradients are compared with their mean."""
    global_batch: int


class Measurements:
    """Norms of one model's gradients, measured in each backward pass and summed over the replicas.

    ``preconditioner``: measures gradients as the optimizer sees them; None to take them as they are.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        device: Device,
        preconditioner: AdamPreconditioner | None,
        warn: Callable[[str], None],
    ) -> None:
        self.module = module
        self.device = device
        self._warn = warn
        self.preconditioner = preconditioner
        self.noise = NoiseScale()
        self.loss_scale: torch.Tensor | None = None
        """Factor on the present step's gradients in mixed precision."""
        self._part_norms: list[torch.Tensor] = []
        """One replica's microbatches: share of the batch times squared norm of the gradient."""
        self._whole_norm: torch.Tensor | None = None
        self._waiting: deque[_Measured] = deque()
        self._travelling: _Measured | None = None
        self._warned_of_numbers = False

    @property
    def are_possible(self) -> bool:
        return self.preconditioner is None or self.preconditioner.ready

    # ------------------------------------------------------------------ in a step

    def begin_step(self) -> None:
        self._part_norms.clear()
        self._whole_norm = self.loss_scale = None

    def measure_part(self, share: float) -> None:
        """Measure one micro-batch after its backward pass; ``share``: its part of the batch's examples."""
        self._part_norms.append(self.norm_of_all() * share)

    def measure_whole(self) -> None:
        self._whole_norm = self.norm_of_all()

    def norm_of_all(self) -> torch.Tensor:
        """Squared norm of the present gradients."""
        pairs = ((parameter, parameter.grad) for parameter in self.module.parameters())
        gradients = [(parameter, gradient) for parameter, gradient in pairs if gradient is not None]
        if self.preconditioner is not None:
            return self.preconditioner.squared_norm_of_all(gradients)
        return squared_norm_of_all(gradients)

    def end_step(
        self, over_replicas: StepNorms | None, *, step: int, num_parts: int, num_micro_batches: int, global_batch: int
    ) -> bool:
        """Keep what this step has measured for a round; return False if it has not measured, or not in every pass.

        ``num_parts``: replicas that have examples of the step.
        """
        if over_replicas is not None and over_replicas.total:
            values = torch.stack([self._sum_of(over_replicas.difference), self._sum_of(over_replicas.total)])
        elif self._whole_norm is not None and len(self._part_norms) == num_micro_batches:
            values = torch.stack([self._sum_of(self._part_norms) - self._whole_norm, self._whole_norm])
        else:
            return False
        if self.loss_scale is not None:
            # Gradients in mixed precision are multiplied by the loss scale; their squared norms by its square.
            values = values / self.loss_scale.to(values.device).double() ** 2
        in_host_memory = self.device.host_memory(values.shape, values.dtype)
        self.device.copy(in_host_memory, values)
        arrived = self.device.mark()
        parts = num_parts if over_replicas is not None else num_micro_batches
        self._waiting.append(
            _Measured(values=in_host_memory, arrived=arrived, step=step, num_parts=parts, global_batch=global_batch)
        )
        return True

    def _sum_of(self, parts: list[torch.Tensor]) -> torch.Tensor:
        # Made in the reductions' streams.
        for part in parts:
            device_of(part).read_here([part])
        return summed(parts)

    # ------------------------------------------------------------------ in a later step's round

    def to_sum(self, step: int) -> tuple[float, float]:
        """Return this replica's part of this step's round."""
        # A GPU's norms arrive while the next step is computed; one step more, and nobody waits for them.
        age = 1 if self.device.is_host else 2
        if not self._waiting or step - self._waiting[0].step < age:
            return 0.0, 0.0
        measured = self._waiting.popleft()
        measured.arrived.wait()
        self._travelling = measured
        return float(measured.values[0]), float(measured.values[1])

    def take(self, sums: Sequence[float], *, init_batch: int, may_overflow: bool) -> None:
        """Take the sums over the replicas, the same on all; ``may_overflow``: a scaler skips such steps."""
        measured, self._travelling = self._travelling, None
        if measured is None:
            return
        first, second = sums
        sqr, trace = from_parts(
            second + first, second, num_parts=measured.num_parts, global_batch=measured.global_batch
        )
        work = max(1.0, measured.global_batch / init_batch)
        if not self.noise.update(sqr, trace, work=work) and not may_overflow and not self._warned_of_numbers:
            self._warned_of_numbers = True
            self._warn(
                f"the gradient of step {measured.step} was not finite, so the noise scale ignores it. Weights "
                "trained with such gradients become NaN; lower the learning rate, clip gradients, or use a "
                "GradScaler"
            )

    def forget_waiting(self) -> None:
        """Forget what waits for a round: other replicas make the rounds from now on."""
        self._waiting.clear()
        self._travelling = None
