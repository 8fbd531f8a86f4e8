"""Entering: how this replica becomes a member of a generation, whoever it meets there."""

from __future__ import annotations

import time
from typing import Protocol

from dist_core.errors import JoinAgain, PeerLost, ReplicaExit
from dist_core.generations.generation import Generation
from dist_core.generations.membership import Membership, Prepared
from dist_core.generations.state_transfer import hand_over, share_state
from dist_core.generations.torchrun import torchrun_group
from dist_core.hooks import first_step_begins
from dist_core.life import Life
from dist_core.link.client import ControlChannel
from dist_core.link.environment import standalone_world
from dist_core.link.news import News
from dist_core.state.persistence import Persistence
from dist_core.state.position import Position
from dist_core.trial.batch_agreement import BatchAgreement
from dist_core.trial.models import Models


class Entering:
    def __init__(
        self, generation: Generation, membership: Membership, batch: BatchAgreement, news: News, life: Life
    ) -> None:
        self._generation = generation
        self._membership = membership
        self.batch = batch
        self._news = news
        self._life = life

    def enter(self, prepared: Prepared, *, agree: bool) -> None:
        """Enter the prepared generation.

        ``agree``: on a batch size, where none came with the state or the last round.
        """
        self._generation.enter(prepared)
        self._membership.commit(prepared)
        self._life.entered(self._generation.group.rank, self._generation.number)
        if agree:
            self.batch.agree()

    def say_that_we_switched(self, since: float | None = None) -> None:
        """Report the switch; ``since``: when training stopped for it, by ``time.perf_counter``."""
        if since is not None:
            self._news.note_pause(time.perf_counter() - since)
        if self._generation.group.rank == 0:
            self._news.announce("/switched", {"generation": self._generation.number})


class Arrival(Protocol):
    """The way by which a replica comes to its trial."""

    def epoch_to_join(self) -> int | None:
        """Return the epoch in which a replica joins a trial that trains; None if it starts its trial."""
        ...

    def come_in(self) -> None:
        """Enter the first generation; returns with equal state on all ranks. Raises JoinAgain, ReplicaExit."""
        ...


class ScheduledArrival:
    """Arrival at a scheduler's generation, of a trial that begins or of one that trains."""

    def __init__(
        self,
        generation: Generation,
        membership: Membership,
        channel: ControlChannel,
        position: Position,
        states: Persistence,
        entering: Entering,
    ) -> None:
        self._generation = generation
        self._membership = membership
        self._channel = channel
        self._position = position
        self._states = states
        self._entering = entering
        self._asked_at = 0.0
        self._attempts = membership.earlier_attempts

    def epoch_to_join(self) -> int | None:
        self._asked_at = time.monotonic()
        self._attempts += 1
        # The processes of one replica ask equally often, and hear the same.
        epoch = self._channel.request("GET", "/position", params={"attempt": self._attempts})["epoch"]
        return None if epoch is None else int(epoch)

    def come_in(self) -> None:
        prepared = self._meet()
        # A joiner's batch size came with the state.
        self._entering.enter(prepared, agree=not self._generation.joining)
        self._entering.say_that_we_switched()

    def _meet(self) -> Prepared:
        """Return the generation to enter, with equal state on all its replicas."""
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
            with self._generation.meeting(prepared) as group:
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


class StandaloneArrival:
    """Without a scheduler: alone, or with the processes that torchrun or mpirun has started."""

    def __init__(
        self,
        generation: Generation,
        position: Position,
        states: Persistence,
        models: Models,
        batch: BatchAgreement,
        life: Life,
    ) -> None:
        self._generation = generation
        self._position = position
        self._states = states
        self._models = models
        self._batch = batch
        self._life = life

    def epoch_to_join(self) -> int | None:
        return None

    def come_in(self) -> None:
        if not self._position.own_steps:
            self._life.began()
        rank, world_size = standalone_world()
        group = None
        if world_size > 1:
            group = torchrun_group(rank, world_size, self._models.group_needs)
            data_parallel = group.data_parallel
            received = hand_over(data_parallel, self._states.capture() if data_parallel.rank == 0 else None)
            if data_parallel.rank != 0:
                self._states.restore(received)
        self._generation.enter_without_scheduler(group)
        self._life.entered(rank, 0)
        self._batch.agree()
