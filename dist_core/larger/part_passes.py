"""PartPasses: the passes of a step through a model of which this process has a part."""

from __future__ import annotations

from typing import Any

import torch

from dist_core.data.order import StepPlan
from dist_core.errors import BatchLeftOut, InvalidTraining
from dist_core.gradients.bucket_reducer import StepNorms
from dist_core.gradients.earlier_passes import around_backward
from dist_core.gradients.noise.measurements import Measurements
from dist_core.gradients.step_place import StepPlace
from dist_core.larger.part_sums import PartSums
from dist_core.trial.participants import Passes
from dist_core.trial.replica import Replica


class PartPasses(Passes):
    """Passes of a step through the part of a model that this process has.

    ``weighs``: whether gradients come unweighted. ``shares_data``: whether a replica's processes see one batch.
    """

    user_accumulates = False

    def __init__(
        self,
        core: Replica,
        parameters: list[torch.nn.Parameter],
        place: StepPlace,
        over: PartSums,
        measurements: Measurements,
        *,
        weighs: bool,
        shares_data: bool,
    ) -> None:
        super().__init__(parameters, place, over, measurements)
        self._sums = over
        self._core = core
        self._weighs = weighs
        self._shares_data = shares_data
        self._num_parts = 1
        self._counts: list[float] | None = None
        """Examples of each pass of this replica, on measured steps."""
        self._passed = False
        """True once the present pass has come through its backward pass."""

    # ------------------------------------------------------------------ as the loader announces them

    def begin(self, step: StepPlan, index: int, *, measures: bool) -> None:
        """Begin the pass of micro-batch ``index``; ``measures``: its gradients feed the noise scale."""
        self.place.begin_micro_batch(step, index, measures=measures)
        self._passed = False
        if index > 0:
            return
        self._earlier_gradients.drop()
        self.measurements.begin_step()
        self._sums.reduced = False
        self._sums.passive = self._core.generation.group.world_size == 1
        each = 1 if self._shares_data else self._core.generation.group.members
        self._num_parts = -(-step.num_parts // each)
        measures = measures and self.measurements.are_possible
        self._counts = self._examples_of_replica(step) if measures else None
        self._sums.measuring = measures and self._num_parts > 1
        self._sums.norms = StepNorms([], []) if self._sums.measuring else None

    def _examples_of_replica(self, step: StepPlan) -> list[float]:
        mine = [len(each) * (step.weight > 0.0) for each in step.micro_batches]
        if self._shares_data or not self._core.model_parallel.is_met:
            return [float(each) for each in mine]
        return self._core.model_parallel.sum(mine, self._core.generation.mark_broken)

    @property
    def weight(self) -> float:
        """Share of the step's batch in the present pass of this process."""
        step = self.place.step
        if step is None:
            return 1.0
        return len(step.micro_batches[self.place.index]) / step.global_batch if step.weight else 0.0

    def begin_dry(self) -> None:
        super().begin_dry()
        self._passed = False

    def note_loss_scale(self) -> None:
        """Do nothing: losses are not scaled here."""

    @property
    def came_by_all(self) -> bool:
        return True

    unsent_amount = None

    def lay_out_buckets(self) -> None: ...

    def reduce_nothing(self) -> None:
        raise BatchLeftOut("for a model that spans several slots, because its processes compute together")

    def leave_step_out(self) -> None:
        self._earlier_gradients.drop()
        self.drop_gradients()

    def weigh(self, amount: float, total: float | None) -> None:
        raise InvalidTraining(
            "loader.weigh() does not support models that span several slots, because their passes are weighted by "
            "the number of samples; use a loss that is a mean over samples"
        )

    # ------------------------------------------------------------------ behind a backward pass

    def watch(self, output: Any) -> None:
        """Watch the output of a forward pass, to act behind its backward pass."""
        around_backward(output, self._backward, begin=None, end=self.end_pass, weights=self._parameters)

    def end_pass(self) -> None:
        """End a backward pass: its gradients wait for the step's others, or all of them are summed."""
        self._sums.reduced = True
        place = self.place
        if place.step is None or place.passed_step:
            return
        if self._passed:
            raise InvalidTraining(
                "the training loop takes several backward passes over one batch through a model that is divided "
                "among several processes; add the losses up, and call backward() once"
            )
        self._passed = True
        if self._weighs:
            for parameter in self._parameters:
                if parameter.grad is not None:
                    parameter.grad.mul_(self.weight)
        if self._splits_to_measure and self._counts is not None:
            # What came is the pass's part of the mean gradient, and that of its own examples is wanted.
            self.measurements.measure_part(sum(self._counts) / max(self._counts[place.index], 1e-30))
        if not place.is_last_micro_batch:
            self._earlier_gradients.take(1.0)
            return
        self._earlier_gradients.join(1.0)
        if self._splits_to_measure:
            self.measurements.measure_whole()
        counts = self._counts
        self._sums.reduce(None if counts is None else sum(counts) / place.step.global_batch)

    @property
    def _splits_to_measure(self) -> bool:
        return self.place.measures and self._sums.is_alone and self.place.has_several_passes

    # ------------------------------------------------------------------ a step's end

    def end_step(self) -> None:
        """End the step on this replica, applied or skipped.

        Its measurements are sent with the next control reduction.
        """
        step, over = self.place.step, self._sums
        over.measuring = False
        if step is not None and self.measurements.end_step(
            over.norms,
            step=self._core.position.steps,
            num_parts=self._num_parts,
            num_micro_batches=len(step.micro_batches),
            global_batch=step.global_batch,
        ):
            over.norms = None
