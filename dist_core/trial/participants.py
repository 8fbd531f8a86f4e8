"""Loaders and wrapped models as a trial sees them, so that it does not have to import them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch

from dist_core.data.order import StepPlan
from dist_core.device import Device, Elapsed, Mark
from dist_core.generations.group_needs import GroupNeeds
from dist_core.generations.process_groups import ReplicaGroup
from dist_core.goodput import BatchBounds, GradientStatistics
from dist_core.gradients.earlier_passes import Backward, EarlierGradients
from dist_core.gradients.noise.measurements import Measurements
from dist_core.gradients.step_place import StepPlace


class PacingLoader(Protocol):
    """The loader that drives batch size and progress, as the trial sees it."""

    bounds: BatchBounds

    @property
    def cursor(self) -> Any: ...

    @property
    def epoch_size(self) -> int | None:
        """Samples that make an epoch; None when nobody knows."""
        ...

    @property
    def order_fingerprint(self) -> int:
        """16 bits of where this loader stands, and of the order it goes through."""
        ...

    @property
    def reads_a_stream(self) -> bool:
        """True where every replica reads all samples, and keeps a part of each batch."""
        ...

    def commit(self, taken: int) -> None:
        """Count a step over ``taken`` samples."""
        ...

    def complete_step(self) -> None:
        """Count the last step of an epoch that ends while an iterator over this loader is still held."""
        ...

    def take_over(self, before: Any) -> None:
        """Go on where another loader over the same data stands; the script makes a new one each epoch."""
        ...


class Passes(ABC):
    """Passes of one model's steps as the loader announces them, through a whole model or a part of one.

    ``over``: what sums gradients; ``measurements``: of their noise.
    """

    user_accumulates = False
    """True if the user's code sums gradients over several of the loader's batches by itself."""

    def __init__(
        self, parameters: Sequence[torch.nn.Parameter], place: StepPlace, over: Reduction, measurements: Measurements
    ) -> None:
        self._parameters = list(parameters)
        self.place = place
        self.over = over
        self.measurements = measurements
        self._earlier_gradients = EarlierGradients(self._parameters)
        self._backward = Backward()

    @abstractmethod
    def begin(self, step: StepPlan, index: int, *, measures: bool) -> None:
        """Begin the pass of micro-batch ``index`` of ``step``.

        ``measures``: whether its gradients feed the noise scale.
        """

    @abstractmethod
    def weigh(self, amount: float, total: float | None) -> None:
        """Weigh the present pass by ``amount``; ``total``: of all replicas and passes, given in the last pass."""

    @abstractmethod
    def note_loss_scale(self) -> None:
        """Note the loss scale during backward: a scaler changes it before the step is over."""

    @abstractmethod
    def end_step(self) -> None:
        """End the step on this replica, applied or skipped."""

    def look_at_optimizer(  # noqa: B027  # parts have nothing to say of theirs
        self, optimizer: torch.optim.Optimizer
    ) -> None:
        """Look at an optimizer that steps weights of no wrapped model."""

    def look_at_loss(self, loss: torch.Tensor) -> None:  # noqa: B027  # parts have nothing to say of theirs
        """Warn of a loss whose gradient depends on how batches are divided."""

    def look_at_gradients(self) -> None:  # noqa: B027  # parts have gradients from backward passes alone
        """Look at the gradients that an optimizer is about to step on, for some that the script has set by itself."""

    @property
    def were_bypassed(self) -> bool:
        """Tell whether gradients of one of several passes have come by another way than the wrapped model."""
        return False

    # ------------------------------------------------------------------ gradients that the script sums up by itself

    @property
    def awaits_update(self) -> bool:
        """Tell whether the present step's gradients wait for those of later batches."""
        return False

    def take_back_gradients(self) -> None:  # noqa: B027
        """Put gradients that wait for later batches back to what they were before the present step."""

    # ------------------------------------------------------------------ a step that is left out

    @property
    @abstractmethod
    def came_by_all(self) -> bool:
        """Tell whether each of the present step's earlier passes has come through its backward pass, or none has."""

    @abstractmethod
    def lay_out_buckets(self) -> None:
        """Lay gradient buckets out as a forward pass does, together with the other replicas."""

    @abstractmethod
    def reduce_nothing(self) -> None:
        """Take part in the others' reductions without gradients. Raises InvalidTraining where that cannot be done."""

    @property
    @abstractmethod
    def unsent_amount(self) -> float | None:
        """Return this replica's part of a sum that others make in a step where this one says no amounts; else None."""

    @abstractmethod
    def leave_step_out(self) -> None:
        """Leave the step out: it makes no update, and nothing stays of its gradients and measurements."""

    # ------------------------------------------------------------------ passes that belong to no step

    def end_probe(self, *, trained: bool) -> None:
        self.place.end_probe()
        if trained:
            self.drop_gradients()

    def begin_dry(self) -> None:
        """Begin a joiner's pass on its own, which makes what steps need and changes nothing that lasts."""
        self.place.begin_dry_step()
        summing = self.over.group
        summing.reduced = False
        summing.passive, summing.measuring = True, False

    def end_dry(self) -> None:
        """End the dry steps of a replica that is alone, and leave none of their gradients."""
        self.place.is_dry = False
        self.over.group.passive = False
        self.drop_gradients()

    def leave(self) -> None:
        """Leave the loader's steps, and keep nothing of a step that was left in its middle."""
        self.place.leave()
        self._earlier_gradients.drop()
        self.over.group.measuring = False

    def drop_gradients(self) -> None:
        self._earlier_gradients.drop()
        for parameter in self._parameters:
            parameter.grad = None

    @property
    def took_gradients(self) -> bool:
        """Tell whether gradients have come since the present step began."""
        return self.over.group.reduced


class Summing(Protocol):
    """Summing of one group's gradients, as the passes and the optimizer see it."""

    passive: bool
    """A pass that other replicas take no part in."""
    measuring: bool
    last_bucket: Mark | None
    reduced: bool
    """True once gradients have come to be summed in the present step."""


class Reduction(Protocol):
    """Over the group that trains at present."""

    begins: Callable[[], None]
    """Called when the first gradients of a step are there to be summed."""

    @property
    def group(self) -> Summing: ...

    @property
    def is_alone(self) -> bool: ...

    @property
    def needs(self) -> GroupNeeds: ...

    def use(self, group: ReplicaGroup) -> None: ...

    @property
    def proposal(self) -> int | None: ...

    def tune(self, announced: int | None) -> None: ...

    def note_update(self) -> None: ...

    def whole_replica_agrees(self, succeeded: bool) -> bool:
        """Tell whether the step's sums are whole on all processes of this replica, given this one's own answer."""
        ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class TrainedModel(Protocol):
    """A wrapped model, as its trial and the loader that announces the steps see it."""

    module: torch.nn.Module
    noise_every: int | None
    resyncs: bool
    """True to take rank 0's weights over where replicas turn out to hold others; else the trial fails."""
    device_of_gradients: Device
    step_place: StepPlace
    """Place of the training loop within a step."""

    @property
    def groups_by_hand(self) -> Sequence[dict[str, Any]]:
        """Return the groups of its optimizers' parameters whose rates no schedule sets."""
        ...

    @property
    def over(self) -> Reduction:
        """Return what sums its gradients."""
        ...

    @property
    def training(self) -> bool: ...

    @property
    def passes(self) -> Passes: ...

    @property
    def reduction(self) -> Elapsed | None:
        """Return the time from the last step's last bucket to the end of the reduction.

        None where nothing was reduced.
        """
        ...

    # ------------------------------------------------------------------ a step's round

    def norms_to_sum(self) -> tuple[float, float]:
        """Return this replica's part of the round that is being launched."""
        ...

    def take_norms(self, first: float, second: float) -> None:
        """Receive both norms, summed over the replicas: the same numbers on all of them."""
        ...

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
        """Return the learning rates as the user and the schedules have set them."""
        ...

    @property
    def learning_rate_factor(self) -> float:
        """Return the factor on the learning rates in the present step."""
        ...

    def adopt_schedule(self) -> None:
        """Adopt a schedule that was made after the model was wrapped, as if it had been given."""
        ...

    def replicated_tensors(self) -> Iterator[torch.Tensor]:
        """Yield the tensors that replicas have in common between steps: weights, and the optimizer's state."""
        ...
