"""Transitions: how this replica comes into generations, from one to the next, and out of the last one."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Sequence
from typing import Any

from dist_core.errors import EXIT_PREEMPTED, PeerLost, ReplicaExit, RunAgain
from dist_core.generations.decision import Decision
from dist_core.generations.generation import Generation
from dist_core.generations.heal import Heal, Healed
from dist_core.generations.join import Join
from dist_core.generations.losses import Losses
from dist_core.generations.membership import Membership, Prepared
from dist_core.generations.running_sums import RunningSums
from dist_core.generations.state_transfer import hand_over
from dist_core.generations.step_record import Standing, StepRecord
from dist_core.generations.step_vote import StepVote
from dist_core.generations.switch import Switch
from dist_core.generations.torchrun import torchrun_group
from dist_core.link.client import ControlChannel
from dist_core.link.environment import standalone_world
from dist_core.link.news import News
from dist_core.state.persistence import Persistence
from dist_core.state.position import Position
from dist_core.state.random_streams import RandomStreams
from dist_core.trial.batch_agreement import BatchAgreement
from dist_core.trial.models import Models
from dist_core.trial.rollback import ACCUMULATOR_PREFIX, Rollback
from dist_core.trial.saving import Saving


class Transitions:
    """``membership`` and ``channel``: None for a process without a scheduler."""

    def __init__(
        self,
        generation: Generation,
        position: Position,
        states: Persistence,
        random: RandomStreams,
        models: Models,
        batch: BatchAgreement,
        vote: StepVote,
        record: StepRecord,
        sums: RunningSums,
        rollback: Rollback,
        saving: Saving,
        news: News,
        membership: Membership | None,
        channel: ControlChannel | None,
    ) -> None:
        self._generation = generation
        self._position = position
        self._states = states
        self._random = random
        self._models = models
        self._batch = batch
        self._vote = vote
        self._record = record
        self._sums = sums
        self._rollback = rollback
        self._saving = saving
        self._news = news
        self._membership = membership
        self.on_enter: list[Callable[[], None]] = []
        """Called whenever this replica has entered a generation of its scheduler."""
        self._join: Join | None = None
        self._switch: Switch | None = None
        self._heal: Heal | None = None
        if membership is not None and channel is not None:
            losses = Losses(generation)
            membership.group_needs = lambda: models.group_needs
            membership.on_loss = losses.note
            self._join = Join(generation, losses, membership, channel, position, states)
            self._switch = Switch(generation, losses, membership, position, states, news)
            self._heal = Heal(generation, losses, membership, news)

    # ------------------------------------------------------------------ coming in

    def epoch_to_join(self) -> int | None:
        """Return the epoch in which a replica joins a trial that trains; None if it starts its trial."""
        return None if self._join is None else self._join.epoch_to_join()

    def come_in(self) -> None:
        """Enter the first generation; returns with equal state on all ranks. Raises JoinAgain, ReplicaExit."""
        if self._join is None:
            self._meet_without_scheduler()
            return
        prepared = self._join.meet()
        # A joiner's batch size came with the state.
        self._enter(prepared, agree=not self._generation.joining)
        self._say_that_we_switched()

    def _meet_without_scheduler(self) -> None:
        if not self._position.own_steps:
            self._models.adopt_schedules()
        rank, world_size = standalone_world()
        group = None
        if world_size > 1:
            group = torchrun_group(rank, world_size, self._models.group_needs)
            data_parallel = group.data_parallel
            received = hand_over(data_parallel, self._states.capture() if data_parallel.rank == 0 else None)
            if data_parallel.rank != 0:
                self._states.restore(received)
        self._generation.enter_without_scheduler(group)
        self._random.enter(rank, 0)
        self._states.checkpoints.training_begins()
        self._models.use_group(self._generation.group)
        self._batch.agree()

    def _enter(self, prepared: Prepared, *, agree: bool) -> None:
        assert self._membership is not None
        self._generation.enter(prepared)
        self._random.enter(self._generation.group.rank, self._generation.number)
        for tell in self.on_enter:
            tell()
        self._news.training_goes_on()
        self._states.checkpoints.training_begins()
        self._membership.commit(prepared)
        self._models.use_group(self._generation.group)
        if agree:
            self._batch.agree()

    def _say_that_we_switched(self) -> None:
        if self._generation.group.rank == 0:
            self._news.announce("/switched", {"generation": self._generation.number})

    # ------------------------------------------------------------------ from one to the next

    def votes(self, prepared: Prepared | None) -> Sequence[float]:
        """Return this replica's values for a step's round."""
        return (0.0, 0.0, 0.0) if self._switch is None else self._switch.vote(prepared)

    def follow(self, prepared: Prepared, votes: Sequence[float], batch: Sequence[float]) -> None:
        """At a step boundary: enter this generation if all replicas have voted for it, with rank 0's batch for it."""
        assert self._switch is not None
        decision = self._switch.decide(prepared, votes)
        if decision is Decision.STAY:
            return
        self._batch.forget_next()
        if decision is Decision.ABANDON:
            self._switch.abandon(prepared)
        else:
            self._enter_with_all(self._switch, prepared, batch)

    def _enter_with_all(self, switch: Switch, prepared: Prepared, batch: Sequence[float]) -> None:
        started = time.perf_counter()
        self._sums.settle()
        if self._generation.broken is not None and prepared.group is not None:
            # Others may have what was just summed, and enter: who they cannot go on with says so there.
            self.heal(in_step=False)
            return
        if prepared.group is None:
            if not prepared.generation.members:
                self._saving.leave_paused()
            self._make_way()
            self._news.flush()
            raise ReplicaExit("left")
        # Before the state is handed over: it goes to the joiners with it.
        self._batch.use(*batch)
        if switch.has_joiners(prepared):
            if not switch.hand_over(prepared):
                self._batch.agree()
                return
            self._enter(prepared, agree=False)
        else:
            self._enter_smaller(prepared)
        self._news.note_pause(time.perf_counter() - started)
        self._say_that_we_switched()

    def _enter_smaller(self, prepared: Prepared) -> None:
        """Some leave and nobody joins: all that stay have the trial's state, up to the last step of who leaves."""
        assert self._heal is not None
        lost = healed = None
        try:
            healed = self._heal.meet_if_awaited(prepared, self, enter=self._go_on_healed)
        except PeerLost as error:
            # Others may have entered already: this replica heals with them from there.
            lost = str(error)
        if healed is not None:
            self._run_again_if_needed(healed)
            return
        self._enter(prepared, agree=False)
        if lost is not None:
            self._generation.mark_broken(lost)

    def _make_way(self) -> None:
        """Make way for survivors, who may want this core at once: what is left to do here is to end."""
        with contextlib.suppress(OSError):
            os.nice(19)

    # ------------------------------------------------------------------ without one that is lost

    def heal(self, *, in_step: bool) -> None:
        """Another replica vanished: wait for the generation without it and go on from the furthest survivor.

        Possible at a step boundary of the epoch everybody is in; elsewhere PeerLost ends this replica and the trial
        resumes from its checkpoint. Raises RunAgain where the lost one has taken a part of an evaluation with it.
        """
        reason = self._generation.broken or "a collective failed"
        if in_step:
            self._sums.take_back()
        if self._heal is None:
            raise PeerLost(f"another replica vanished: {reason}")
        started = time.perf_counter()
        if (
            self._generation.group.members > 1
            and self._membership is not None
            and self._membership.must_leave is not None
        ):
            # Those of its replica that heard it first have left; this is no loss.
            self._news.flush()
            raise ReplicaExit("preempted", EXIT_PREEMPTED)
        self._drop_group()
        self._batch.forget_next()
        healed = self._heal.wait_and_meet(self, reason=reason, enter=self._go_on_healed)
        self._news.note_pause(time.perf_counter() - started)
        self._say_that_we_switched()
        self._run_again_if_needed(healed)

    def _run_again_if_needed(self, healed: Healed) -> None:
        if healed.runs_again:
            self._news.warn(
                "a replica was lost in an evaluation, and what it had seen of it: the training code runs again from "
                "its top and evaluates anew with the others"
            )
            raise RunAgain

    def _drop_group(self) -> None:
        self._generation.drop(self._models.group_needs)
        self._vote.reset()
        self._models.use_group(self._generation.group)
        self._models.drop_gradients()

    def _go_on_healed(self, healed: Healed) -> None:
        self._record.go_on_from(healed.furthest)
        self._enter(healed.prepared, agree=True)

    # This replica's training, as far as a loss concerns it (`Survivor`).

    def standing(self) -> Standing:
        position = self._position
        return Standing(
            steps=position.steps,
            updates=self._record.updates,
            epoch=position.epoch,
            meetings=self._record.meetings,
            has_evaluated=position.has_evaluated and position.in_epoch_loop and self._rollback.is_open,
        )

    def go_back_behind_loop(self) -> None:
        if not self._position.in_training_loop:
            self._rollback.go_back_behind_loop()
            self._rollback.forget()
            # Also where this group loses one before it trains.
            self._position.has_evaluated = True

    def states(self) -> dict[str, Any]:
        return self._states.capture()

    def take(self, states: dict[str, Any], *, is_a_step_behind: bool) -> None:
        self._states.before_update()
        # What each has added since the sums were made is its own.
        if is_a_step_behind:
            self._sums.catch_up(states)
        own = {name: state for name, state in states.items() if not name.startswith(ACCUMULATOR_PREFIX)}
        self._states.restore(own)
