"""PartSums: gradients of the part of a model that this process has, summed over those that have the same part.

A process's gradients are weighted as they come, so that what its replica has adds up to the replica's share of the
step's mean gradient; here those of all replicas are added. On measured steps the squared norms for the noise scale are
taken on the way: of a replica's share before, of the whole mean after. Norms add up over the parts of a model, which
the step's round does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from dist_core.device import Device, Mark
from dist_core.errors import PeerLost
from dist_core.generations.group_needs import GroupNeeds, carrier_for
from dist_core.generations.process_groups import ReplicaGroup
from dist_core.gradients.bucket_reducer import StepNorms
from dist_core.gradients.noise.measurements import Measurements
from dist_core.state.parts import local_of
from dist_core.trial.replica import Replica

BUCKET_BYTES = 25 * 2**20
"""One is summed while the next is gathered."""


class PartSums:
    """Sums of gradients over the processes that have the same part of a model."""

    norms: StepNorms | None = None
    last_bucket: Mark | None = None
    proposal: int | None = None

    def __init__(
        self,
        core: Replica,
        parameters: Sequence[torch.nn.Parameter],
        measurements: Measurements,
        whole: ReplicaGroup,
        *,
        slots_per_share: int,
    ) -> None:
        self._core = core
        self._parameters = parameters
        self._measurements = measurements
        self._device: Device = measurements.device
        self._model_group = whole
        self._slots_per_share = slots_per_share
        self.begins: Callable[[], None] = lambda: None
        self._data_parallel: ReplicaGroup | None = None
        self.passive = True
        self.measuring = False
        self.reduced = False

    @property
    def group(self) -> PartSums:
        return self

    # ------------------------------------------------------------------ the replicas

    @property
    def is_alone(self) -> bool:
        return self._data_parallel is None or self._data_parallel.world_size == 1

    @property
    def needs(self) -> GroupNeeds:
        carriers, members = frozenset({carrier_for(self._device)}), self._model_group.world_size
        if members == 1:
            return GroupNeeds(carriers=carriers)
        return GroupNeeds(members=members, of_parts=carriers, slots_per_share=self._slots_per_share)

    def use(self, group: ReplicaGroup) -> None:
        self._measurements.forget_waiting()
        self._data_parallel = group.data_parallel
        self.passive = group.world_size == 1

    def whole_replica_agrees(self, succeeded: bool) -> bool:
        """Tell whether all of a replica's processes make an update: all of them do, or none. Collective."""
        if self._model_group.world_size == 1:
            return succeeded
        try:
            [votes] = self._core.model_parallel.sum([float(succeeded)], self._core.generation.mark_broken)
        except PeerLost:
            return False
        if round(votes) < self._model_group.world_size:
            self._core.generation.mark_broken("the gradients were not summed by all processes of this replica")
            return False
        return True

    # ------------------------------------------------------------------ a step's gradients

    def reduce(self, replica_weight: float | None) -> None:
        """Sum over the replicas, once all passes of a step are through.

        ``replica_weight``: its share, where that is known. A collective that fails is reported, and the step is not
        applied.
        """
        if self.passive:
            return
        self.last_bucket = self._device.mark()
        self.begins()
        data_parallel = self._data_parallel
        assert data_parallel is not None
        if data_parallel.world_size == 1:
            return
        norms = self.norms if self.measuring and replica_weight is not None else None
        if norms is not None and replica_weight:
            norms.difference.append(self._norm() / replica_weight)
        try:
            self._sum(data_parallel)
        except RuntimeError as error:
            self._core.generation.mark_broken(str(error))
            return
        if norms is not None:
            # Each replica has all of it, and the round adds them up.
            mine = self._norm() / data_parallel.world_size
            norms.difference.append(-mine)
            norms.total.append(mine)

    def _norm(self) -> torch.Tensor:
        return self._measurements.norm_of_all()

    def _sum(self, data_parallel: ReplicaGroup) -> None:
        under_way = []
        for bucket in _buckets(self._gradients()):
            flat = torch.cat([each.reshape(-1) for each in bucket])
            over = data_parallel.carrying([flat])
            sent = flat if over.name() == "nccl" else flat.cpu()
            under_way.append((bucket, flat, sent, over, over.allreduce([sent])))
        for bucket, flat, sent, over, work in under_way:
            data_parallel.wait(work, over)
            if sent is not flat:
                flat.copy_(sent)
            for gradient, values in zip(bucket, torch.split(flat, [each.numel() for each in bucket]), strict=True):
                gradient.copy_(values.view_as(gradient))

    def _gradients(self) -> list[torch.Tensor]:
        """Return the gradients of all parameters, whether or not this replica's examples reached them."""
        for parameter in self._parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        return [local_of(parameter.grad) for parameter in self._parameters if parameter.grad is not None]

    # ------------------------------------------------------------------ what buckets of DDP's can do besides

    def tune(self, announced: int | None) -> None:
        """Do nothing: there is one way to reduce."""

    def note_update(self) -> None:
        """Do nothing: reductions are not timed here."""

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Do nothing: there is no state."""


def _buckets(gradients: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
    buckets: list[list[torch.Tensor]] = []
    size, kind = 0, None
    for gradient in gradients:
        if kind != gradient.dtype or size + gradient.nbytes > BUCKET_BYTES:
            buckets.append([])
            size, kind = 0, gradient.dtype
        buckets[-1].append(gradient)
        size += gradient.nbytes
    return buckets
