"""MovingBuffers: buffers that the forward pass changes by itself, such as a codebook, are one on all replicas.

DistributedDataParallel sends rank 0's buffers before each pass. Here they are sent behind a step in which some have
been written, and only where something computes with them: running statistics of normalizations differ within an epoch,
as DDP's do between two passes, and are rank 0's where it ends.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from dist_core.errors import PeerLost
from dist_core.generations.decision import all_equal, short_checksum
from dist_core.generations.generation import Generation
from dist_core.generations.state_transfer import broadcast_in_place
from dist_core.generations.step_vote import Voter
from dist_core.life import Listener
from dist_core.torch_private import times_written
from dist_core.trial.models import Models

_Mark = list[tuple[int, int]]
"""Address of each buffer, and how often it was written."""


class MovingBuffers(Voter, Listener):
    name = "buffers"

    def __init__(self, generation: Generation, models: Models) -> None:
        self._generation = generation
        self._models = models
        self._modules: tuple[int, list[torch.nn.Module]] = (0, [])
        """Modules with buffers, beside normalizations, of so many models."""
        self._before: _Mark | None = None

    def entered(self, rank: int, number: int) -> None:
        self._begin_anew()
        self._before = _mark_of(self._buffers())

    def runs_again(self) -> None:
        self._begin_anew()

    def _begin_anew(self) -> None:
        self._modules, self._before = (0, []), None

    def put(self) -> Sequence[float]:
        """Tell whether a buffer has been written since the last step, and of which shapes they are."""
        group = self._generation.group
        if group.world_size == 1 or group.members > 1:
            return 0.0, 0.0, 0.0
        buffers = self._buffers()
        now, before = _mark_of(buffers), self._before
        self._before = now
        shapes = float(short_checksum(repr([each.shape for each in buffers]).encode())) if buffers else 0.0
        return float(before is not None and now != before), shapes, shapes**2

    def follow(self, agreed: Sequence[float]) -> None:
        """Send buffers that have been written on any replica; collective."""
        group, (written, shapes, squares) = self._generation.group, agreed
        if not written or not all_equal(shapes, squares, group.world_size) or self._generation.broken is not None:
            return
        buffers = self._buffers()
        try:
            broadcast_in_place(group, buffers)
        except PeerLost as error:
            self._generation.mark_broken(str(error))
        self._before = _mark_of(buffers)

    def _buffers(self) -> list[torch.Tensor]:
        """Return those that are part of the models' state, in their order."""
        number, modules = self._modules
        if number != len(self._models):
            every = (module for model in self._models for module in model.module.modules())
            norms = torch.nn.modules.batchnorm._NormBase
            modules = [each for each in every if each._buffers and not isinstance(each, norms)]
            self._modules = len(self._models), modules
        return [
            buffer
            for module in modules
            for name, buffer in module._buffers.items()
            if buffer is not None and name not in module._non_persistent_buffers_set
        ]


def _mark_of(buffers: Sequence[torch.Tensor]) -> _Mark:
    return [(each.data_ptr(), times_written(each)) for each in buffers]
