"""Loops: the epochs of a trial and the training loops in them, as the user's code goes through them."""

from __future__ import annotations

from dist_core.errors import InvalidTraining, ReplicaExit
from dist_core.generations.generation import Generation
from dist_core.generations.running_sums import RunningSums, Summed
from dist_core.generations.state_transfer import broadcast_in_place
from dist_core.generations.step_record import StepRecord
from dist_core.link.news import News
from dist_core.state.persistence import Persistence
from dist_core.state.position import Position
from dist_core.trial.leaving import Leaving
from dist_core.trial.models import Models
from dist_core.trial.pacing import Pacing
from dist_core.trial.participants import PacingLoader
from dist_core.trial.rendezvous import Rendezvous
from dist_core.trial.rollback import ACCUMULATOR_PREFIX, Rollback
from dist_core.trial.saving import Saving
from dist_core.trial.transitions import Transitions


class Loops:
    def __init__(
        self,
        generation: Generation,
        position: Position,
        states: Persistence,
        models: Models,
        pacing: Pacing,
        record: StepRecord,
        sums: RunningSums,
        rollback: Rollback,
        leaving: Leaving,
        saving: Saving,
        transitions: Transitions,
        rendezvous: Rendezvous,
        news: News,
    ) -> None:
        self._generation = generation
        self._position = position
        self._states = states
        self._models = models
        self._record = record
        self._sums = sums
        self._rollback = rollback
        self._leaving = leaving
        self._saving = saving
        self._transitions = transitions
        self._rendezvous = rendezvous
        self._news = news
        self._pacing = pacing
        self._left: PacingLoader | None = None
        """Whose loop the user's code has left before its end, until something follows."""
        self.evaluations = 0
        """Evaluation loops that are running."""
        self.replaying = False
        """A loop's body runs once more without effect: what it reports was reported."""

    def forget(self) -> None:
        """The user's code begins again from its top."""
        self.evaluations, self.replaying = 0, False

    @property
    def are_between(self) -> bool:
        """Tell whether the code that runs is an epoch's, which runs again where the trial is resumed within it."""
        return not (self._position.in_training_loop or self.evaluations or self.replaying)

    # ------------------------------------------------------------------ epochs

    def start_epochs(self, limit: int) -> None:
        """Entering the epoch loop: find out where the trial stands. Raises ReplicaExit when it is about over."""
        position, generation = self._position, self._generation
        if position.in_epoch_loop:
            raise InvalidTraining("remaining_epochs_until() is used inside itself; one epoch loop at a time")
        position.limit = limit
        if not position.own_steps:
            self._models.adopt_schedules()
        if self._states.keeps_some:
            self._states.go_on_from_kept()
        elif not generation.joined and not self._states.has_looked:
            epoch = self._transitions.epoch_to_join()
            generation.joining = epoch is not None
            if epoch is None:
                self._states.restore_newest()
            else:
                generation.come_to_train()
                position.epoch = epoch
                if epoch >= limit:
                    raise ReplicaExit("left")
        position.in_epoch_loop = True
        self._rollback.begin_between_loops()

    def restore_early(self) -> None:
        """Before the epoch loop: from here on each state has its content as soon as it is registered.

        Not of a joiner, which hears from the others when it comes to train.
        """
        if self._states.keeps_some:
            self._states.go_on_early()
        elif not self._generation.joined and not self._states.has_looked and self._transitions.epoch_to_join() is None:
            self._states.restore_newest()

    def end_epoch(self) -> None:
        self._leaving.raise_postponed()
        if self._pacing.loader is not None:
            self._pacing.loader.complete_step()
        if self._sums and self._generation.joined:
            # What was added to them in this epoch cannot be added again in the next one.
            self._sums.settle()
        of_this_epoch = f"{ACCUMULATOR_PREFIX}{self._position.epoch}-"
        self._states.registry.forget(of_this_epoch)
        self._sums.end_epoch(of_this_epoch)
        self._position.end_epoch(self._pacing.epoch_size)
        self._record.epoch_ends()
        self._left = None
        self._news.epoch_ends()
        self._saving.save_if_due()
        self._rollback.begin_between_loops()

    def leave_epochs(self) -> None:
        self._position.in_epoch_loop = False

    # ------------------------------------------------------------------ training loops

    def begin(self) -> bool:
        """A training loop starts; False for one that the trial has completed in this epoch before it was resumed."""
        if self._position.in_training_loop:
            raise InvalidTraining(
                "a training loop over an AdaptiveDataLoader starts while another one runs; iterate them one after "
                "another, or join their datasets (torch.utils.data.StackDataset gives pairs of samples)"
            )
        self._left = None
        begins = self._position.begin_loop()
        if begins:
            self._rollback.forget()
        else:
            self._rollback.begin_between_loops()
        return begins

    def end(self) -> None:
        """A pass of the training loader is over: buffers (running statistics) become rank 0's everywhere."""
        generation = self._generation
        self._position.leave_loop()
        self._models.end_training_loop()
        if generation.group.world_size > 1:
            # Also without one that was lost in the last step: whoever has not noticed does so here.
            buffers = self._models.buffers()
            if buffers:
                # Parts that compute one share together have buffers of their own.
                self._rendezvous.do(
                    lambda group: broadcast_in_place(
                        group if group.slots_per_share == 1 else group.data_parallel, buffers
                    )
                )
            self._sums.settle()
        self._rollback.begin_between_loops()

    def leave_early(self, loader: PacingLoader, *, has_trained: bool) -> None:
        self._left = loader
        self._position.leave_loop_early(has_trained=has_trained)

    def go_on_behind(self) -> None:
        """Code has left a loop, and goes on. Raises what it could not hear of then."""
        self._leaving.raise_postponed()
        if not self._position.in_training_loop:
            self._position.stay_out_of_loop()
            self._left = None

    def go_back_into_left_loop(self) -> None:
        """The loop that the user's code has left is not over: it runs again from its top."""
        self._position.go_back_into_loop()
        if self._left is not None:
            self._left.cursor.left = False

    @property
    def stands_behind_next(self) -> bool:
        """Tell whether the trial was resumed within the training loop that this process comes to, or behind it."""
        return not self._generation.joining and self._position.is_behind_next_loop

    # ------------------------------------------------------------------ what belongs to an epoch

    def adopt_accumulator(self, accumulator: Summed) -> None:
        """Its sums are part of the trial's state; one made within an epoch is so until the epoch ends."""
        position = self._position
        prefix = f"{ACCUMULATOR_PREFIX}{position.epoch if position.in_epoch_loop else 'all'}"
        name = self._states.registry.unique_name(prefix)
        self._states.registry.register(name, accumulator)
        self._sums.adopt(name, accumulator)
