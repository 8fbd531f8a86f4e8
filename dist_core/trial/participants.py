"""What a trial and its wrapped models ask of each other; neither has to import the other."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

import torch

from dist_core.data.order import StepPlan
from dist_core.generations.process_groups import GroupNeeds, ReplicaGroup
from dist_core.goodput import BatchBounds, GradientStatistics


class PacingLoader(Protocol):
    """The loader that drives batch size and progress, as the trial sees it."""

    bounds: BatchBounds

    @property
    def cursor(self) -> Any:
        """Where in the data training stands."""
        ...

    @property
    def epoch_size(self) -> int | None:
        """Samples that make an epoch; None when nobody knows."""
        ...

    @property
    def order_fingerprint(self) -> int:
        """16 bits of where this loader stands, and of the order it goes through."""
        ...

    def commit(self, taken: int) -> None:
        """A step over ``taken`` samples counts."""
        ...

    def complete_step(self) -> None:
        """The epoch ends while an iterator over this loader is still held: its last step counts now."""
        ...

    def take_over(self, before: Any) -> None:
        """Go on where another loader over the same data stands; the script makes a new one each epoch."""
        ...


class TrainedModel(Protocol):
    """A wrapped model, as its trial and the loader that announces the steps see it."""

    training: bool
    module: torch.nn.Module
    noise_every: int | None

    @property
    def user_accumulates(self) -> bool:
        """Whether the user's code sums gradients over several batches of the loader on its own."""
        ...

    @property
    def sync_seconds(self) -> float:
        """How long the last step's reduction went on behind the backward pass."""
        ...

    # ------------------------------------------------------------------ the step as the loader announces it

    def begin_micro_batch(self, step: StepPlan, index: int, *, measures: bool) -> None: ...

    def leave_step(self) -> None:
        """What comes next is not a step of the loader; of one that was left in its middle nothing stays behind."""
        ...

    def begin_probe(self) -> None:
        """A loop over evaluation batches begins; should an optimizer step in it, nothing of it counts."""
        ...

    def end_probe(self, *, trained: bool) -> None: ...

    def begin_dry_step(self) -> None:
        """A joiner's pass on its own: builds the buckets, changes nothing that lasts."""
        ...

    def end_dry_steps(self) -> None: ...

    def end_training_loop(self) -> None: ...

    @property
    def stepped(self) -> bool:
        """Whether the optimizer has stepped since the present batch was handed out."""
        ...

    @property
    def took_gradients(self) -> bool:
        """Whether gradients have come to the buckets since the present step began."""
        ...

    @property
    def passed_step(self) -> bool:
        """Whether the present micro-batch has come to the step of one of its optimizers."""
        ...

    @property
    def is_in_a_part(self) -> bool:
        """Whether the present step takes several passes."""
        ...

    # ------------------------------------------------------------------ the group it reduces over

    @property
    def group_needs(self) -> GroupNeeds: ...

    @property
    def staleness(self) -> int:
        """How many steps replicas may be apart."""
        ...

    def use_group(self, group: ReplicaGroup) -> None:
        """Reduce over another group from the next step on; all its replicas call this at the same step boundary."""
        ...

    def drop_gradients(self) -> None: ...

    # ------------------------------------------------------------------ a step's round

    def end_step(self) -> None:
        """A step is over on this replica, applied or skipped."""
        ...

    def norms_to_sum(self) -> tuple[float, float]:
        """What this replica adds to the round that is being launched."""
        ...

    def take_norms(self, first: float, second: float) -> None:
        """The sums over the replicas, the same on all of them."""
        ...

    @property
    def tuning_proposal(self) -> int | None:
        """The way to reduce that is to be kept, once all have been timed and until it is announced."""
        ...

    def tune(self, announced: int | None) -> None: ...

    # ------------------------------------------------------------------ what it knows

    @property
    def statistics(self) -> GradientStatistics | None:
        """Squared norm of this model's gradient and its variance at the initial batch size, once measured."""
        ...

    @property
    def gain(self) -> float:
        """Steps at the initial batch size that the present step is worth."""
        ...

    def rates(self) -> list[float]:
        """The learning rates as the user and the schedules have set them."""
        ...

    def adopt_schedule(self) -> None:
        """A schedule that was made after the model was wrapped becomes its own, as if it had been given."""
        ...

    def replicated_tensors(self) -> Iterator[torch.Tensor]:
        """What is the same on all replicas between two steps: weights, and the optimizer's state of them."""
        ...
