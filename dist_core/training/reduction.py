"""Reduction: how the gradients of a wrapped model are summed over the replicas; in DDP's buckets, by a strategy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

from torch.nn.parallel import DistributedDataParallel

from dist_core.device import Device
from dist_core.errors import BatchLeftOut, PeerLost
from dist_core.generations.decision import all_vote_alike, short_checksum, vote_for
from dist_core.generations.group_needs import GroupNeeds, carrier_for
from dist_core.generations.process_groups import ReplicaGroup
from dist_core.gradients.bucket_reducer import BucketReducer
from dist_core.gradients.bucket_views import GradientViews
from dist_core.gradients.checks import refuse_weights_changed_within_step, trained_weights
from dist_core.gradients.choice import ReductionChoice
from dist_core.gradients.noise.measurements import Measurements
from dist_core.torch_private import layout_of_buckets, rebuild_buckets, reduce_zeros, replace_process_group
from dist_core.trial.replica import Replica


class BucketReduction:
    """Sums gradients over the replicas in DDP's buckets, by the strategy that was chosen."""

    def __init__(
        self,
        core: Replica,
        model: DistributedDataParallel,
        device: Device,
        choice: ReductionChoice,
        measurements: Measurements,
    ) -> None:
        self._core = core
        self._model = model
        self._device = device
        self._choice = choice
        self._measurements = measurements
        self.begins: Callable[[], None] = lambda: None
        self.group: BucketReducer = cast("BucketReducer", None)
        """Reducer that DDP asks for all-reduces."""
        self._trained = trained_weights(model.module)
        """Weights that DDP has made buckets for."""
        self.views = GradientViews(model.module)
        self._is_fresh = True
        """No gradient has come since the buckets were made."""

    @property
    def is_alone(self) -> bool:
        return self._core.generation.group.world_size == 1

    # ------------------------------------------------------------------ the replicas

    @property
    def needs(self) -> GroupNeeds:
        return self._choice.group_needs | GroupNeeds(carriers=frozenset({carrier_for(self._device)}))

    def use(self, group: ReplicaGroup) -> None:
        """Use this group from the next step on; all its replicas call this at the same step boundary.

        Raises InvalidTraining when the group lacks what this model's strategies need.
        """
        self._choice.refuse(group, self.needs)
        self._measurements.forget_waiting()
        is_first = self.group is None
        if not is_first:
            self.group.close()
        self.group = BucketReducer(
            group,
            self._choice.strategy,
            self._device,
            on_first_bucket=self.begins,
            on_error=self._core.generation.mark_broken,
        )
        self.group.passive = group.world_size == 1
        self.group.views = self.views
        if self._measurements.preconditioner is not None:
            self.group.norm_of = self._measurements.preconditioner.squared_norm
        # Another group lays them out anew, after its first step. Ranks of torchrun begin together, with fresh buckets.
        compares = group.world_size > 1 and not is_first and bool(self._core.generation.members)
        layout = self._layout() if compares else None
        replace_process_group(self._model, self.group)
        if compares and not self._lie_alike(group, layout):
            self._lay_out_anew(group)
        self._choice.enter(group, self._model, self.group)

    # ------------------------------------------------------------------ weights that are frozen, unfrozen or added

    def follow_weights(self) -> None:
        """Make buckets for the weights that require a gradient now, before the forward pass whose gradients go there.

        A model that is frozen as a whole for a moment, as in the other half of a GAN, is not trained in this pass.
        Raises InvalidTraining where the step's gradients are being summed in other buckets already.
        """
        present = trained_weights(self._model.module)
        if present == self._trained or not present:
            return
        if self.group.reductions:
            refuse_weights_changed_within_step(self._model.module, self._trained)
        self._lay_out_anew(self._core.generation.group)
        self._core.same_weights.forget()

    def _lay_out_anew(self, group: ReplicaGroup) -> None:
        self._trained = trained_weights(self._model.module) or self._trained
        self._is_fresh = True
        self._choice.lay_out_anew(group, self._model, self.group)

    def _lie_alike(self, group: ReplicaGroup, layout: str | None) -> bool:
        """Tell whether the replicas' gradients lie in the same buckets; collective.

        They do not where a joiner's passes on its own went another way through the model than rank 0's, or left out
        every batch.
        """
        vote = vote_for(None if layout is None else short_checksum(layout.encode()))
        try:
            count, total, squares = group.sum_of(*vote, what="gradient buckets")
        except PeerLost as error:
            self._core.generation.mark_broken(str(error))
            return True
        return all_vote_alike(count, total, squares, group.world_size)

    def _layout(self) -> str | None:
        """Return which weights lie in which bucket; None where the next forward pass changes that."""
        model, present = self._model, trained_weights(self._model.module)
        if present and present != self._trained:
            return None
        stays = self._is_fresh or (model.find_unused_parameters and not model.static_graph)
        buckets = "as they were made" if stays else layout_of_buckets(model)
        trained = [index for index, each in enumerate(model.module.parameters()) if id(each) in self._trained]
        return None if buckets is None else f"{trained} in {buckets}"

    # ------------------------------------------------------------------ the strategy

    @property
    def proposal(self) -> int | None:
        """Return the candidate to keep, on rank 0 once all have been timed; None before, and after it was announced."""
        return self._choice.proposal

    def tune(self, announced: int | None) -> None:
        """Go to the next candidate, or to the one that rank 0 announced; on all replicas, at a step boundary."""
        if not self.is_alone:
            self._choice.tune(announced, self._model, self.group)

    def whole_replica_agrees(self, succeeded: bool) -> bool:
        return succeeded

    def lay_out_buckets(self) -> None:
        """Do what a forward pass does before it computes, which all replicas have to do in the same step."""
        self.follow_weights()
        rebuild_buckets(self._model)

    def reduce_nothing(self) -> None:
        model = self._model
        if (
            model.find_unused_parameters
            or model.static_graph
            or self._choice.strategy.reads_layout
            or any(getattr(module, "sparse", False) for module in model.modules())
        ):
            raise BatchLeftOut(
                "with find_unused_parameters, static_graph, sparse gradients or power_sgd, because this replica "
                "cannot know what the others send"
            )
        self._is_fresh = False
        self.group.begin_backward()
        self.group.norms = None
        reduce_zeros(self._model)

    def note_update(self) -> None:
        self._choice.time_step(self._device.mark, world_size=self._core.generation.group.world_size)

    def state_dict(self) -> dict[str, Any]:
        return self._choice.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._choice.load_state_dict(state)

    def read_layouts_if_needed(self, *, are_rebuilt: bool) -> None:
        """Read the bucket layouts, if needed: a forward pass has told DDP's reducer which buckets it will fill."""
        self._is_fresh = False
        measures = self.group.norms is not None and self._measurements.preconditioner is not None
        if (measures or self._choice.strategy.reads_layout) and not self.is_alone:
            self._choice.read_layouts(self._model, self.group, are_rebuilt=are_rebuilt)
