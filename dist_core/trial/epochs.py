"""Epochs: the loop over a trial's epochs, and where the trial stands when it begins."""

from __future__ import annotations

from dist_core.errors import InvalidTraining, NothingLeftToTrain, ReplicaExit
from dist_core.generations.generation import Generation
from dist_core.generations.running_sums import RunningSums
from dist_core.life import Life, Listener
from dist_core.state.persistence import Persistence
from dist_core.state.position import Position
from dist_core.trial.departure import Leaving
from dist_core.trial.entering import Arrival
from dist_core.trial.pacing import Pacing


class Resumption(Listener):
    """Finds where the trial stands when its code begins: at its start, at a checkpoint, or where others train."""

    def __init__(
        self, generation: Generation, position: Position, states: Persistence, arrival: Arrival, life: Life
    ) -> None:
        self._generation = generation
        self._position = position
        self._states = states
        self._arrival = arrival
        self._life = life

    def find_out(self, limit: int) -> None:
        """Find out where the trial stands; raise ReplicaExit when it is about over."""
        if not self._position.own_steps:
            self._life.began()
        if self._states.keeps_some:
            self._states.go_on_from_kept()
        elif not self._generation.joined and not self._states.has_looked:
            epoch = self._arrival.epoch_to_join()
            if epoch is None:
                self._generation.come_to_begin()
                self._states.restore_newest()
                self._refuse_to_end_at_once(limit)
            else:
                self._generation.come_to_train()
                self._position.come_to_epoch(epoch)
                if epoch >= limit:
                    raise ReplicaExit("left")

    def _refuse_to_end_at_once(self, limit: int) -> None:
        epoch, parent = self._position.epoch, self._states.parent
        if parent and self._states.checkpoints.came_from_parent and epoch >= limit > 0:
            raise NothingLeftToTrain(
                f"this trial begins with the state of {parent}, which has trained {epoch} epochs, and trains until "
                f"epoch {limit}: nothing is left to train. Give it more epochs than its parent had"
            )

    def restore_early(self) -> None:
        """Give each state its content as soon as it is registered, from before the epoch loop on.

        Not of a joiner, which hears from the others when it comes to train.
        """
        if self._states.keeps_some:
            self._states.go_on_early()
        elif not self._generation.joined and not self._states.has_looked and not self.joins:
            self._states.restore_newest()

    @property
    def joins(self) -> bool:
        """Tell whether this replica comes to a trial that trains."""
        return self._arrival.epoch_to_join() is not None

    def come_in_early(self) -> None:
        """Meet the other processes before the epoch loop, with the state that the trial has."""
        self.restore_early()
        self._arrival.come_in()

    def joins_again(self) -> None:
        self._states.look_again()


class Epochs:
    def __init__(
        self,
        position: Position,
        resumption: Resumption,
        pacing: Pacing,
        sums: RunningSums,
        leaving: Leaving,
        life: Life,
        *,
        more_epochs: int = 0,
    ) -> None:
        """Count the trial's epochs, and ``more_epochs`` beyond those that the code asks for."""
        self._position = position
        self._resumption = resumption
        self._pacing = pacing
        self._sums = sums
        self._leaving = leaving
        self._life = life
        self.more_epochs = more_epochs
        self._asked_for = (-1, 0)
        """Run of the code, and the latest limit that it has asked for."""

    def begin(self, limit: int) -> int:
        """Enter the epoch loop where the trial stands, and return its limit. Raises ReplicaExit if it is about over."""
        if self._position.in_epoch_loop:
            raise InvalidTraining(
                "remaining_epochs_until() was called within another loop over it; run one epoch loop at a time"
            )
        if limit > 0:
            limit += self.more_epochs
        self._position.note_limit(limit)
        self._resumption.find_out(limit)
        self._refuse_second_loop(limit)
        self._position.enter_epochs()
        self._life.epochs_began()
        return limit

    def _refuse_second_loop(self, limit: int) -> None:
        """Refuse a loop that would train nothing, as one for a second fold or stage would by the same number."""
        run, before = self._asked_for
        self._asked_for = (self._position.runs, limit)
        if run == self._position.runs and 0 < limit <= min(before, self._position.epoch):
            raise InvalidTraining(
                f"the script asks for a second loop over epochs, until epoch {limit}, but its trial has trained "
                f"{self._position.epoch} already: the number counts all epochs of the trial, and the loop would train "
                "nothing. For a second stage ask for the sum, remaining_epochs_until(first + second); train folds in a "
                "trial each, with the fold as a parameter"
            )

    def refuse_extension(self, setting: str) -> None:
        """Raise InvalidTraining for a trial that is to train more epochs than its trainer will."""
        if self.more_epochs:
            raise InvalidTraining(
                f"this trial is to train {self.more_epochs} epochs more than its code asks for, but how many a trainer "
                f"trains is decided by its {setting}; begin it with the parent's state and a larger {setting} instead "
                "(`elastune fork TRIAL --set NAME=VALUE`, or enqueue_from(study, params={...}))"
            )

    def end_epoch(self) -> None:
        self._leaving.raise_postponed()
        self._pacing.complete_step()
        self._sums.end_epoch()
        self._position.epoch_done(self._pacing.epoch_size)
        self._life.epoch_ended()

    def leave(self) -> None:
        self._life.epochs_ended()
        self._position.leave_epochs()
