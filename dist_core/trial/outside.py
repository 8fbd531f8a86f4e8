"""Training outside of a loader's loops: ranks of torchrun meet for it, and replicas that cannot are refused."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from dist_core.errors import InvalidTraining, PeerLost
from dist_core.generations.generation import Generation
from dist_core.generations.state_transfer import broadcast_in_place
from dist_core.link.environment import ReplicaEnvironment, standalone_members, standalone_world
from dist_core.link.news import News
from dist_core.state.random_streams import RandomStreams
from dist_core.trial.epochs import Resumption
from dist_core.trial.pacing import Pacing


class OutsideOfLoops:
    """Replicas come and go only at a loader's steps: outside of them a trial has those that have met, or one."""

    def __init__(
        self,
        environment: ReplicaEnvironment | None,
        generation: Generation,
        resumption: Resumption,
        random: RandomStreams,
        pacing: Pacing,
        news: News,
    ) -> None:
        self._replicas = (
            standalone_world()[1] // standalone_members()
            if environment is None
            else environment.replicas // environment.members
        )
        """Replicas that were started together, until they have met."""
        self._is_elastic = environment is not None
        self._generation = generation
        self._resumption = resumption
        self._random = random
        self._pacing = pacing
        self._news = news
        self._has_told = False

    def begin_forward(self, buffers: Iterable[torch.Tensor]) -> None:
        """Average the gradients of a forward pass of ranks of torchrun, as DistributedDataParallel does.

        What they draw for themselves, they go on to draw; ``buffers`` become those of rank 0.
        """
        if self._is_elastic or self._replicas == 1:
            return
        self.meet()
        shared = list(buffers)
        if shared:
            broadcast_in_place(self._generation.group, shared)

    def meet(self) -> None:
        """Have ranks of torchrun meet now, unless they have."""
        if not (self._is_elastic or self._replicas == 1 or self._generation.joined):
            with self._random.left_alone():
                self._resumption.come_in_early()

    def refuse_to_train_alone(self) -> None:
        """Raise InvalidTraining before an update by which this replica would train by itself, and PeerLost."""
        if self._generation.broken is not None:
            raise PeerLost(self._generation.broken)
        if self._generation.joined or self._replicas == 1:
            return
        if self._is_elastic:
            # What comes before the first loop every replica does by itself, and goes on from what the first one has.
            if self._pacing.awaits_loader:
                self._tell()
                return
            if self._resumption.joins:
                return
        raise InvalidTraining(
            "an optimizer stepped outside of a loop over an AdaptiveDataLoader, on gradients that were not summed over "
            f"the {self._replicas} replicas: each would train by itself. Read the training data with "
            "dist_core.AdaptiveDataLoader, in a loop over remaining_epochs_until(), or give the trial one replica "
            "(max_replicas=1)"
        )

    def _tell(self) -> None:
        if not self._has_told:
            self._has_told = True
            self._news.warn(
                f"an optimizer stepped before the first loop over an AdaptiveDataLoader: each of the {self._replicas} "
                "replicas does that by itself, and they go on from what the first one has"
            )
