"""Loops: the training loops of an epoch, as the user's code goes through them."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from dist_core.errors import InvalidTraining, JoinAgain, PeerLost, RunAgain
from dist_core.generations.generation import Generation
from dist_core.generations.running_sums import RunningSums
from dist_core.generations.state_transfer import broadcast_in_place
from dist_core.life import Life, Listener
from dist_core.link.environment import ReplicaEnvironment, standalone_members, standalone_world
from dist_core.link.news import News
from dist_core.state.memory_limit import is_out_of_memory
from dist_core.state.position import Position
from dist_core.state.random_streams import RandomStreams
from dist_core.trial.batch_agreement import BatchAgreement
from dist_core.trial.departure import Leaving
from dist_core.trial.epochs import Resumption
from dist_core.trial.models import Models
from dist_core.trial.pacing import Pacing
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
        self.evaluated_alone = False
        """The last evaluation since a training loop was made by each replica alone, of all samples."""
        self.puts_together = False
        """The script has put together by a collective of its own what replicas have computed."""
        self.replaying = False
        """A loop's body runs once more without effect: what it reports was reported."""

    def runs_again(self) -> None:
        self.evaluations, self.replaying = 0, False
        self.evaluated_alone = False

    def epoch_ended(self) -> None:
        self._loader_left_early = None
        self.evaluated_alone = False

    def note_collective(self) -> bool:
        """Note a collective of the script's own; tell whether it may put together what each replica has of all samples.

        From then on evaluations are shared. Those of a training loop may be of layers.
        """
        if self._position.in_training_loop:
            return False
        is_news, self.puts_together = not self.puts_together, True
        return is_news and self.evaluated_alone

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
        self.evaluated_alone = False
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


class Rerun:
    def __init__(
        self,
        generation: Generation,
        batch: BatchAgreement,
        loops: Loops,
        rollback: Rollback,
        news: News,
        life: Life,
    ) -> None:
        self._generation = generation
        self._batch = batch
        self._loops = loops
        self._rollback = rollback
        self._news = news
        self._life = life

    def is_made_ready(self, error: BaseException) -> bool:
        """Tell whether the user's code, which ended with this error, is to run again; all is made ready for that."""
        if isinstance(error, JoinAgain):
            self._join_later()
        elif isinstance(error, RunAgain):
            self._batch.keep()
            self._go_on(in_loop=error.in_loop)
        elif is_out_of_memory(error) and self._shrinks(error):
            # It has left the loop by this very error.
            self._go_on(in_loop=True)
        else:
            return False
        return True

    def _join_later(self) -> None:
        """Forget what the first run registered, keep the identity."""
        self._life.runs_again()
        self._life.joins_again()
        self._generation.begin_anew()

    def _go_on(self, *, in_loop: bool) -> None:
        """Go on where the trial stands; the code builds everything anew.

        ``in_loop``: within the loop that it has left.
        """
        self._rollback.go_back_behind_loop()
        if in_loop:
            self._loops.go_back_into_left_loop()
        self._rollback.keep_for_next_run()
        self._life.runs_again()
        self._generation.come_to_begin()

    def _shrinks(self, error: BaseException) -> bool:
        """Note the bound of a batch that did not fit, and tell whether the user's code may run again from its top.

        Nothing is lost: weights are as of the last complete step. A replica among others leaves instead, and is
        replaced by one that knows the bound. Raises PeerLost for that, and InvalidTraining when no smaller batch is
        allowed.
        """
        if self._batch.adaptation is None or not self._generation.joined:
            return False
        learnt = self._batch.shrink(error)
        self._news.warn(f"{learnt} ({error})")
        if self._generation.group.world_size > 1:
            raise PeerLost(f"{learnt}; this replica leaves, and another one starts with this limit")
        return True


class OutsideOfLoops:
    """Training outside of a loader's loops, where a trial has the replicas that have met, or one."""

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
        self._pacing.habits.refuse_batch_behind_loop()
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
