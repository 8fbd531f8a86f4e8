"""Join: how a replica comes into its first generation, of a trial that begins or of one that trains."""

from __future__ import annotations

import time

from dist_core.errors import JoinAgain, PeerLost, ReplicaExit
from dist_core.generations.generation import Generation
from dist_core.generations.losses import Losses
from dist_core.generations.membership import Membership, Prepared
from dist_core.generations.state_transfer import hand_over, share_state
from dist_core.hooks import first_step_begins
from dist_core.link.client import ControlChannel
from dist_core.state.persistence import Persistence
from dist_core.state.position import Position


class Join:
    def __init__(
        self,
        generation: Generation,
        losses: Losses,
        membership: Membership,
        channel: ControlChannel,
        position: Position,
        states: Persistence,
    ) -> None:
        self._generation = generation
        self._losses = losses
        self._membership = membership
        self._channel = channel
        self._position = position
        self._states = states
        self._asked_at = 0.0
        self._attempts = membership.earlier_attempts

    def epoch_to_join(self) -> int | None:
        """Return the epoch in which a replica joins a trial that trains; None if it starts its trial."""
        self._asked_at = time.monotonic()
        self._attempts += 1
        # The processes of one replica ask equally often, and hear the same.
        epoch = self._channel.request("GET", "/position", params={"attempt": self._attempts})["epoch"]
        return None if epoch is None else int(epoch)

    def meet(self) -> Prepared:
        """Return the generation to enter, with equal state on all its replicas. Raises JoinAgain, ReplicaExit."""
        joining = self._generation.joining
        came_in = time.monotonic() - self._asked_at if joining else None
        first_step_begins()
        self._channel.request(
            "POST",
            "/ready",
            {
                "join_epoch": self._position.epoch if joining else None,
                "seconds": came_in,
                "attempt": self._attempts,
            },
        )
        prepared = self._wait_for_generation()
        states = self._states
        try:
            with self._losses.meeting(prepared) as group:
                data_parallel = group.data_parallel
                if joining:
                    received = share_state(data_parallel, states.capture(), is_replicated=states.is_replicated())
                else:
                    received = hand_over(data_parallel, states.capture() if data_parallel.rank == 0 else None)
        except PeerLost as error:
            self._membership.abandon(prepared.generation.number)
            raise JoinAgain from error
        if data_parallel.rank != 0:
            epoch = self._position.epoch
            states.restore(received)
            if self._position.epoch != epoch:
                raise PeerLost(
                    f"this replica joined the trial in epoch {self._position.epoch}, but its own code is in epoch "
                    f"{epoch}"
                )
        return prepared

    def _wait_for_generation(self) -> Prepared:
        while True:
            prepared = self._membership.wait_for_first(attempt=self._attempts)
            if prepared is None:
                raise JoinAgain
            if prepared.group is None:
                raise ReplicaExit("left")
            if not self._generation.joining or prepared.generation.join_epoch == self._position.epoch:
                return prepared
            # Offered for an epoch this joiner no longer stands in: not entering makes the survivors stay as they are.
            self._membership.abandon(prepared.generation.number)
            prepared.group.break_off()
