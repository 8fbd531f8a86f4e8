"""Loops: the training loops of an epoch, as the user's code goes through them."""

from __future__ import annotations

from dist_core.errors import InvalidTraining
from dist_core.generations.generation import Generation
from dist_core.generations.running_sums import RunningSums
from dist_core.generations.state_transfer import broadcast_in_place
from dist_core.life import Life, Listener
from dist_core.state.position import Position
from dist_core.trial.leaving import Leaving
from dist_core.trial.models import Models
from dist_core.trial.participants import PacingLoader
from dist_core.trial.rendezvous import Rendezvous
from dist_core.trial.rollback import Rollback


class Loops(Listener):
    def __init__(self, position: Position, rollback: Rollback, leaving: Leaving, life: Life) -> None:
        self._position = position
        self._rollback = rollback
        self._leaving = leaving
        self._life = life
        self._loader_left_early: PacingLoader | None = None
        """Whose loop the user's code has left before its end, until something follows."""
        self.evaluations = 0
        """Evaluation loops that are running."""
        self.replaying = False
        """A loop's body runs once more without effect: what it reports was reported."""

    def runs_again(self) -> None:
        self.evaluations, self.replaying = 0, False

    def epoch_ended(self) -> None:
        self._loader_left_early = None

    @property
    def are_between(self) -> bool:
        """Tell whether the code that runs is an epoch's, which runs again where the trial is resumed within it."""
        return not (self._position.in_training_loop or self.evaluations or self.replaying)

    def begin(self) -> bool:
        """Begin a training loop.

        Return False for one that the trial has completed in this epoch before it was resumed.
        """
        if self._position.in_training_loop:
            raise InvalidTraining(
                "a training loop over an AdaptiveDataLoader starts while another one runs; iterate them one after "
                "another, or join their datasets (torch.utils.data.StackDataset gives pairs of samples)"
            )
        self._loader_left_early = None
        begins = self._position.begin_loop()
        if begins:
            self._rollback.forget()
        self._life.loop_began(completed=not begins)
        if not begins:
            self._rollback.begin_between_loops()
        return begins

    def end(self) -> None:
        """End a pass of the training loader."""
        self._position.leave_loop()
        self._life.loop_ended()

    def leave_early(self, loader: PacingLoader, *, has_trained: bool) -> None:
        self._loader_left_early = loader
        self._position.leave_loop_early(has_trained=has_trained)

    def go_on_behind(self) -> None:
        """Go on behind a loop that the code has left; raise what it could not hear of then."""
        self._leaving.raise_postponed()
        if not self._position.in_training_loop:
            self._position.stay_out_of_loop()
            self._loader_left_early = None

    def go_back_into_left_loop(self) -> None:
        """Go back into the loop that the user's code has left: it is not over, and runs again from its top."""
        self._position.go_back_into_loop()
        if self._loader_left_early is not None:
            self._loader_left_early.cursor.left = False


class EvaluationState(Listener):
    """The state that evaluations see after a training loop: rank 0's buffers (running statistics), everybody's sums."""

    def __init__(self, generation: Generation, models: Models, rendezvous: Rendezvous, sums: RunningSums) -> None:
        self._generation = generation
        self._models = models
        self._rendezvous = rendezvous
        self._sums = sums

    def loop_ended(self) -> None:
        if self._generation.group.world_size == 1:
            return
        # Also without one that was lost in the last step: whoever has not noticed does so here.
        buffers = self._models.buffers()
        if buffers:
            # Parts that compute one share together have buffers of their own.
            self._rendezvous.do(
                lambda group: broadcast_in_place(group if group.slots_per_share == 1 else group.data_parallel, buffers)
            )
        self._sums.settle()
