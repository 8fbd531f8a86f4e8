"""ModelParallelGroup: the processes that this one makes up a replica with, each on a slot of its own.

They are the same for as long as the replica lives, through all generations that it is a member of; whoever of them is
lost takes the replica along. Their group is made when a model first asks for it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from datetime import timedelta

import torch

from dist_core.device import Device
from dist_core.errors import ControlChannelError, InvalidTraining, PeerLost
from dist_core.generations.group_needs import GroupNeeds, carrier_for
from dist_core.generations.process_groups import AddressStore, ReplicaGroup, build_group, lone_group
from dist_core.generations.torchrun import torchrun_part
from dist_core.link.client import ControlChannel
from dist_core.link.environment import ReplicaEnvironment, standalone_members, standalone_world
from dist_core.state.parts import ALONE, Readers
from dist_core.state.seeds import derived_seed
from dist_core.torch_private import refuse_to_divide_with_old_torch

MEET_TIMEOUT = timedelta(minutes=5)
"""Time for a replica's processes to find each other; each first imports what the training code needs."""
COLLECTIVE_TIMEOUT = timedelta(minutes=30)


class ModelParallelGroup:
    def __init__(self, environment: ReplicaEnvironment | None, channel: ControlChannel | None) -> None:
        self._environment = environment
        self._channel = channel
        self._group: ReplicaGroup | None = None
        self._agreed: int | None = None
        if environment is None:
            rank, _ = standalone_world()
            self.members = standalone_members()
            self.member = rank % self.members
        else:
            self.members, self.member = environment.members, environment.member

    def group(self, device: Device) -> ReplicaGroup:
        """Return the group of this replica's processes, by member; block until all have come.

        Raises PeerLost when one does not, and InvalidTraining where there are several and torch is too old for that.
        """
        if self._group is None:
            if self.members > 1:
                refuse_to_divide_with_old_torch()
            self._group = self._made(GroupNeeds(carriers=frozenset({carrier_for(device)})))
        return self._group

    @property
    def is_met(self) -> bool:
        """Tell whether there are several processes, and they have met."""
        return self._group is not None and self.members > 1

    def sum(self, numbers: Sequence[float], mark_broken: Callable[[str], None]) -> list[float]:
        """Sum over the replica's processes, collectively. Raises PeerLost when one of them is lost."""
        assert self._group is not None
        vector = torch.tensor(numbers, dtype=torch.float64)
        work = self._group.sum_later(vector)
        try:
            if work is not None:
                self._group.fuse.wait(work)
        except RuntimeError as error:
            raise losing_the_replica(mark_broken, error) from error
        found: list[float] = vector.tolist()
        return found

    def agreed(self, number: int) -> int:
        """Return a number below 2^52 that is the same on all processes of the replica.

        It is derived from the first process's ``number``. Collective at the first call; remembered then.
        """
        if self._agreed is None:
            mine = derived_seed(number) % 2**52 if self.member == 0 else 0
            [found] = self.sum([float(mine)], lambda reason: None)
            self._agreed = int(found)
        return self._agreed

    def readers(self) -> Readers:
        """Return a checkpoint's readers: the replica's processes, where they have met."""
        if self._group is None or self.members == 1:
            return ALONE
        return Readers(
            self.member,
            self.members,
            lambda numbers: self.sum(numbers, lambda reason: None),
            self._group.broadcast_json,
        )

    def was_torn(self, error: BaseException | None) -> bool:
        """Tell whether this error, or what led to it, says that another process of this replica is gone.

        What torch sums between them by itself, such as the norm of a sharded gradient, says it in its own words.
        """
        while error is not None:
            if isinstance(error, RuntimeError) and is_of_a_connection(error) and self.is_met:
                return True
            error = error.__cause__ or error.__context__
        return False

    def _made(self, needs: GroupNeeds) -> ReplicaGroup:
        if self.members == 1:
            return lone_group(needs)
        if needs.carriers == {"staged"}:
            raise InvalidTraining(
                f"a replica of {self.members} processes needs NCCL and a whole GPU for each process, but NCCL is "
                "missing or its slots are parts of a GPU. Give each slot a whole GPU (slots_per_gpu=1)"
            )
        if self._environment is None or self._channel is None:
            rank, world_size = standalone_world()
            if world_size % self.members:
                raise InvalidTraining(
                    f"ELASTUNE_MEMBERS is {self.members} and WORLD_SIZE is {world_size}; with replicas of "
                    f"{self.members} processes, WORLD_SIZE must be a multiple of that"
                )
            return torchrun_part(rank, world_size, self.members, needs)
        name = self._environment.whole or self._environment.replica_id
        store = AddressStore(self._channel, {"whole": name}, MEET_TIMEOUT)
        try:
            return build_group(
                store,
                name=name,
                rank=self.member,
                nodes=(self._environment.node,) * self.members,
                timeout=COLLECTIVE_TIMEOUT,
                host=self._environment.host,
                needs=needs,
            )
        except (RuntimeError, TimeoutError, ControlChannelError) as error:
            raise PeerLost(
                f"not all {self.members} processes of this replica connected within {COLLECTIVE_TIMEOUT}: {error}"
            ) from error


_LOST = re.compile(
    r"Connection (closed|reset|refused)|Broken pipe|[Tt]imed out waiting|Socket Timeout|nccl(Remote|System)Error"
)


def is_of_a_connection(error: RuntimeError) -> bool:
    """Tell whether the error says that a collective's other end is gone."""
    return _LOST.search(str(error)) is not None


def losing_the_replica(mark_broken: Callable[[str], None], error: RuntimeError) -> PeerLost:
    """Return the error for a failed collective between a replica's processes: it is a replica no more."""
    words = f"another process of this replica vanished: {error}"
    mark_broken(words)
    return PeerLost(words)
