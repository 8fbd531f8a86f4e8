"""StepPasses: forward and backward passes of one model's steps, and what of their gradients is reduced and measured.

The loader announces each pass. Gradients of all but the last are kept out of sight; the last one's reduction carries
the whole step.
"""

from __future__ import annotations

import logging
import math
from typing import Any

import torch

from dist_core.data.order import StepPlan
from dist_core.errors import UNDIVIDED, BatchLeftOut, InvalidTraining
from dist_core.gradients.bucket_reducer import StepNorms
from dist_core.gradients.earlier_passes import SynchronizedNorms, around_backward, note_backward
from dist_core.gradients.noise.measurements import Measurements
from dist_core.gradients.step_place import StepPlace
from dist_core.gradients.wrapped_state import WrappedState
from dist_core.torch_private import after_backward, is_in_backward, loss_scale_of
from dist_core.training.batch_looks import BatchLooks
from dist_core.training.reduction import BucketReduction
from dist_core.trial.participants import Passes
from dist_core.trial.replica import Replica

logger = logging.getLogger(__name__)

_LEAST_SHARE = 1e-6
"""Share of a step's weight that a last pass has at least, as the earlier ones are weighed relative to it."""


class StepPasses(Passes):
    over: BucketReduction

    def __init__(
        self,
        core: Replica,
        module: torch.nn.Module,
        place: StepPlace,
        over: BucketReduction,
        measurements: Measurements,
        wrapped: WrappedState,
    ) -> None:
        super().__init__(list(module.parameters()), place, over, measurements)
        self._core = core
        self._wrapped = wrapped
        self._synchronized_norms = SynchronizedNorms(module)
        self.looks = BatchLooks(core, place, module)
        self._num_parts = 1
        """Replicas that have examples of the present step."""
        self._hidden_passes: set[int] = set()
        """Earlier passes of the present step that have come through their backward pass."""
        self._weighs = False
        """True once the user's code has said what its losses are means over."""
        self._usual_reductions = 1
        """Reductions of the latest step that was not left out."""
        self._has_come = False
        self._came_without = False
        """The latest backward pass has left no gradient in any weight."""
        self._has_joined = False
        """A backward pass has been joined to those of earlier passes, in the last pass of a step."""
        self._passes_that_step = 0
        """Earlier passes of the present step whose body has called the step of an optimizer."""
        self._waiting: list[torch.Tensor | None] = []
        """Gradients as they were before the present step, where the user's code sums them up."""
        self._takes_back = False
        self.user_accumulates = False
        """True if the user's code sums gradients over several of the loader's batches by itself."""

    # ------------------------------------------------------------------ as the loader announces them

    def begin(self, step: StepPlan, index: int, *, measures: bool) -> None:
        """Begin the pass of micro-batch ``index``; ``measures``: its gradients feed the noise scale."""
        stepped_before = self.place.passed_step
        # A forward pass that no backward pass has come through is none of this one's.
        self._backward.forget()
        self.place.begin_micro_batch(step, index, measures=measures)
        world_size = self._core.generation.group.world_size
        even = step.global_batch / (world_size * len(step.micro_batches))
        self._came_without = self._has_joined = False
        self._synchronized_norms.share = len(step.micro_batches[index]) / even if step.weight else 1.0
        if index > 0:
            self._passes_that_step += stepped_before
            return
        self._passes_that_step = 0
        if self._takes_back:
            # Now, when the body that did not count is over: it may have cleared them.
            self._takes_back = False
            for parameter, gradient in zip(self._parameters, self._waiting, strict=True):
                parameter.grad = gradient
        if self.user_accumulates and world_size > 1:
            self._waiting = [None if each.grad is None else each.grad.clone() for each in self._parameters]
        # What an earlier step left behind that was given up in its middle.
        self._earlier_gradients.drop()
        self._hidden_passes.clear()
        self._has_come = False
        self.measurements.begin_step()
        group = self.over.group
        group.reduced, group.reductions = False, 0
        group.passive = world_size == 1
        group.weight = step.weight
        # DDP divides by the number of replicas; the last micro-batch stands for the others, which were made relative.
        exact = world_size * len(step.micro_batches[-1]) / step.global_batch if step.weight else 0.0
        group.correction = 1.0 if math.isclose(exact, 1.0, rel_tol=1e-12) else exact
        self._num_parts = step.num_parts
        measures = measures and not group.passive and not self.user_accumulates and self.measurements.are_possible
        group.measuring = group.exactly = measures and self._num_parts > 1
        group.norms = StepNorms([], []) if group.measuring else None

    def accumulate_for_user(self) -> None:
        """Note that the user's code sums up gradients by itself from now on."""
        if not self.user_accumulates:
            self.user_accumulates = True
            self.over.group.measuring = False
            self._core.batch.forbid_accumulation()
            logger.info("the training loop accumulates gradients itself: its steps do not measure the noise scale")

    @property
    def awaits_update(self) -> bool:
        return self.user_accumulates and not self.place.passed_step

    def take_back_gradients(self) -> None:
        self._takes_back = self.user_accumulates and bool(self._waiting)

    def weigh(self, amount: float, total: float | None) -> None:
        place, group = self.place, self.over.group
        assert place.step is not None
        self._weighs = True
        place.amounts.append(amount)
        if total is None:
            return
        self._refuse_some_weighed()
        # The earlier passes' sums are made relative to this one's, which may count for nothing.
        relative = max(amount, total * _LEAST_SHARE)
        self._earlier_gradients.scale(1.0 / relative if relative else 0.0)
        group.weight = sum(place.amounts) / total if total else place.step.weight
        world_size = self._core.generation.group.world_size
        group.correction = world_size * relative / total if total and place.step.weight else 0.0

    def _refuse_some_weighed(self) -> None:
        place = self.place
        passes = 0 if place.step is None else len(place.step.micro_batches)
        # Passes that are left out are weighed by nothing.
        if 0 < len(place.amounts) <= len(self._hidden_passes):
            raise InvalidTraining(
                f"loader.weigh() was called in {len(place.amounts)} of a step's {passes} passes; call it once for "
                "each batch of the loader, before its backward pass, or not at all"
            )

    def leave(self) -> None:
        """Leave the loop; behind it gradients are averaged over the replicas, as in DistributedDataParallel."""
        super().leave()
        self.over.group.weight = 1.0 / self._core.generation.group.world_size
        self.over.group.correction = 1.0

    # ------------------------------------------------------------------ around a backward pass

    def watch(self, output: Any) -> None:
        """Watch the output of a forward pass, whose backward pass is one of several of a step."""
        self.place.computed = True
        self.looks.forward_ended(output)
        if not self.over.is_alone and self.place.step is not None:
            before = self.over.group.reductions
            note_backward(output, lambda: self._refuse_unreduced_backward(before))
        if not self.place.has_several_passes:
            note_backward(output, self._note_backward)
        elif not self.user_accumulates:
            last = self.place.is_last_micro_batch
            around_backward(
                output,
                self._backward,
                begin=self._give_back_gradients if last else None,
                end=self._whole_gradient_is_there if last else self._hide_gradients,
                weights=self._parameters,
            )

    @property
    def were_bypassed(self) -> bool:
        return self.place.has_several_passes and not self.place.computed

    def look_at_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        self.looks.other_optimizer_steps(optimizer)

    def look_at_gradients(self) -> None:
        place = self.place
        self.over.views.put_back()
        if self.user_accumulates or place.is_dry or place.step is None or not self._has_gradients:
            return
        # Those of an earlier pass are out of sight by now.
        is_seen = not place.is_last_micro_batch and place.index in self._hidden_passes and not place.passed_step
        if self._came_without or is_seen:
            self._core.pacing.train_in_turns(
                "the training loop sets gradients by itself, as after torch.autograd.grad(), but this step takes "
                "several passes, whose gradients are summed out of its sight. Train each batch",
                is_divided=place.has_several_passes,
            )

    @property
    def _has_gradients(self) -> bool:
        return any(parameter.grad is not None for parameter in self._parameters)

    def look_at_loss(self, loss: torch.Tensor) -> None:
        self.looks.backward_begins(loss)

    def _refuse_unreduced_backward(self, before: int) -> None:
        """Refuse a backward pass whose gradients would stay this replica's own.

        ``before``: reductions in the present step when its forward pass was made.
        """
        if self.over.group.reductions > before:
            raise InvalidTraining(
                "gradients are summed over the replicas only in the first backward pass after a forward pass, as in "
                "DistributedDataParallel, but a second backward pass goes through the same forward pass, or through "
                "one that was made before the first backward pass. Add the losses up and call backward() once, or "
                "make each forward pass after the previous backward pass"
            )

    def _note_backward(self) -> None:
        self._has_come = self.place.has_gradients = True
        if is_in_backward():
            after_backward(self._note_what_came)

    def _note_what_came(self) -> None:
        self._came_without = not self._has_gradients

    def note_loss_scale(self) -> None:
        """Note the loss scale during backward: the scaler changes it before the step is over."""
        if self.place.measures and self._wrapped.scaler is not None:
            self.measurements.loss_scale = loss_scale_of(self._wrapped.scaler)

    def _hide_gradients(self) -> None:
        """Hide the gradients of a micro-batch that is not the last."""
        if self.place.step is None or self.place.passed_step:
            # Behind the optimizer's step gradients are another model's, which has this one in its loss.
            return
        self.note_loss_scale()
        self._note_what_came()
        self._measure_part()
        self._earlier_gradients.take(self.place.weight_of_earlier)
        self._hidden_passes.add(self.place.index)
        self._has_come = self.place.has_gradients = True

    def _give_back_gradients(self) -> None:
        self._has_come = self.place.has_gradients = True
        self._refuse_some_weighed()
        # What is there before the first one is this body's own, such as a penalty's, and counts as this pass's.
        several = self._has_joined and self._earlier_gradients.set_aside(keep_views=not self.over.is_alone)
        if self.over.is_alone:
            return
        # What DDP reduces is the whole step's gradient.
        self._earlier_gradients.give_back()
        if several:
            # Norms of this pass alone say nothing about the sum over several.
            self.over.group.measuring = False
            self.over.group.norms = None

    def _whole_gradient_is_there(self) -> None:
        """Join the gradients of a step's passes after the last backward pass, and measure them."""
        self._note_what_came()
        self._has_joined = True
        if self.place.step is not None:
            self._measure_part()
        self._earlier_gradients.join(self.over.group.correction if self.over.is_alone else 1.0)
        if self._splits_to_measure:
            self.measurements.measure_whole()

    @property
    def _splits_to_measure(self) -> bool:
        return self.place.measures and self.over.is_alone and self.measurements.are_possible

    def _measure_part(self) -> None:
        if self._splits_to_measure:
            self.measurements.measure_part(self.place.share)

    # ------------------------------------------------------------------ a step that is left out

    @property
    def came_by_all(self) -> bool:
        place = self.place
        if not (self._has_come and place.has_several_passes) or self.user_accumulates:
            return True
        return len(self._hidden_passes) >= place.index

    def lay_out_buckets(self) -> None:
        if self._synchronized_norms.are_there and not self.user_accumulates:
            raise BatchLeftOut("with SyncBatchNorm, because the other replicas wait for its statistics")
        self.over.lay_out_buckets()

    def reduce_nothing(self) -> None:
        scales = self._wrapped.scaler is not None and self._wrapped.scaler.is_enabled()
        if self.user_accumulates or scales:
            habit = "accumulates gradients itself" if self.user_accumulates else "uses a GradScaler"
            raise BatchLeftOut(
                f"when the training loop {habit}, because the replicas' summed gradients or loss scales would then "
                "differ"
            )
        # What gives the others zeros reaches all weights, and is no backward pass of the loop's.
        self._backward.forget()
        for _ in range(self._usual_reductions):
            self.over.reduce_nothing()

    @property
    def unsent_amount(self) -> float | None:
        place = self.place
        if not self._weighs or place.step is None or len(place.amounts) == len(place.step.micro_batches):
            return None
        return sum(place.amounts)

    def leave_step_out(self) -> None:
        self._earlier_gradients.drop()
        self.over.group.norms = None
        self.over.group.measuring = False
        self.measurements.begin_step()
        self.drop_gradients()

    # ------------------------------------------------------------------ a step's end

    def end_step(self) -> None:
        """End the step on this replica, applied or skipped; its measurements wait for a round."""
        step, group = self.place.step, self.over.group
        group.measuring = False
        if step is None:
            return
        if self.place.passed_step and self.came_by_all and not self.user_accumulates:
            self._refuse_own_count(step)
        if group.reductions and self.place.stepped:
            self._usual_reductions = group.reductions
        if not self.place.stepped and self._wrapped.scaler is None and not self._core.broken:
            self._note_unapplied_gradients()
        if not self.user_accumulates and self.measurements.end_step(
            group.norms,
            step=self._core.position.steps,
            num_parts=self._num_parts,
            num_micro_batches=len(step.micro_batches),
            global_batch=step.global_batch,
        ):
            group.norms = None

    def _note_unapplied_gradients(self) -> None:
        # Those of a batch that is left out are an earlier one's.
        if self._has_come and self._has_gradients:
            assert self.place.step is not None
            self._refuse_own_count(self.place.step)
            self.accumulate_for_user()

    def _refuse_own_count(self, step: StepPlan) -> None:
        """Refuse a body that steps the optimizer in some passes of a divided step, or in none of them.

        One that steps it in all of them makes one update.
        """
        passes = len(step.micro_batches)
        steps = self._passes_that_step + self.place.passed_step
        # A scaler does not let its optimizer step in earlier passes; nor do trainers that know the passes.
        knows_passes = self._wrapped.scaler is not None or self.place.is_asked_for
        if passes == 1 or steps == passes or knows_passes:
            return
        raise InvalidTraining(
            f"the training loop called optimizer.step() in {steps} of the {passes} passes of one step: it "
            "accumulates gradients over batches that it counts itself, or skips a batch after its backward pass. A "
            "pass is only a part of a batch, so the update would not be the one the script means. Train each batch "
            f"{UNDIVIDED}; or skip a batch before its backward pass"
        )
