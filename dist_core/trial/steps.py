"""Steps: what happens between two optimizer steps, from the first reduced gradient to the next batch."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from dist_core.errors import InvalidTraining, PeerLost
from dist_core.generations.generation import Generation
from dist_core.generations.membership import Membership, Prepared
from dist_core.generations.running_sums import RunningSums
from dist_core.generations.step_record import StepRecord
from dist_core.generations.step_vote import Ballot, Round, StepVote
from dist_core.state.position import Position
from dist_core.trial.batch_agreement import BatchAgreement
from dist_core.trial.hinting import Hinting
from dist_core.trial.leaving import Leaving
from dist_core.trial.models import Models
from dist_core.trial.pacing import LoopHabits, Pacing
from dist_core.trial.participants import PacingLoader
from dist_core.trial.saving import Saving
from dist_core.trial.transitions import Transitions
from dist_core.trial.voters import Voter, WholeSteps


class Steps:
    def __init__(
        self,
        generation: Generation,
        position: Position,
        models: Models,
        pacing: Pacing,
        batch: BatchAgreement,
        habits: LoopHabits,
        vote: StepVote,
        record: StepRecord,
        sums: RunningSums,
        leaving: Leaving,
        saving: Saving,
        transitions: Transitions,
        hinting: Hinting,
        membership: Membership | None,
        whole: WholeSteps,
        voters: Sequence[Voter],
    ) -> None:
        self._generation = generation
        self._position = position
        self._models = models
        self._pacing = pacing
        self._batch = batch
        self._habits = habits
        self._vote = vote
        self._record = record
        self._sums = sums
        self._leaving = leaving
        self._saving = saving
        self._transitions = transitions
        self._hinting = hinting
        self._membership = membership
        self._whole = whole
        self._voters = (whole, *voters)

    # ------------------------------------------------------------------ the step's round

    def launch_vote(self) -> None:
        """Start the step's round; called when its first gradients are reduced."""
        self._vote.reduces = True
        self._vote.launch(self._compose)

    @property
    def reduces(self) -> bool:
        """Tell whether gradients of the present step are being reduced on this replica."""
        return self._vote.reduces

    def await_vote(self) -> bool:
        """Wait for the round of this step; False when the step is broken and must not be applied.

        The optimizer waits here before it steps: a step counts on all replicas, or on none.
        """
        if self._generation.broken is None:
            self._vote.wait()
        return self._generation.broken is None and not self.is_left_out

    @property
    def is_left_out(self) -> bool:
        """Tell whether a replica has left out one of the step's passes; False until the round has been waited for."""
        return self._leaves_out(self._vote.under_way)

    def _leaves_out(self, agreed: Round | None) -> bool:
        world_size = self._generation.group.world_size
        if world_size == 1:
            return self._whole.is_left_out_alone()
        return agreed is not None and agreed.is_over and self._whole.leave_out(agreed[self._whole.name], world_size)

    def take_part(self) -> None:
        """Take part in the step's round and, if the body has reduced nothing here, in what the others reduce."""
        if self._vote.reduces or self._generation.group.world_size == 1:
            self._vote.launch(self._compose)
            return
        self._models.lay_out_buckets()
        self._send_amount()
        self._vote.launch(self._compose)
        if self._generation.broken is None:
            self._vote.wait()
        if self._generation.broken is None and self.is_left_out:
            self._models.reduce_nothing()

    def _send_amount(self) -> None:
        """Others may wait for what this replica's loss would have been a mean over."""
        amount, group = self._models.unsent_amount, self._generation.group
        if amount is None or self._generation.broken is not None:
            return
        try:
            group.sum(torch.tensor([amount], dtype=torch.float64), what="what losses are means over")
        except PeerLost as error:
            self._generation.mark_broken(str(error))

    def _compose(self) -> tuple[Ballot, Prepared | None]:
        prepared = None if self._membership is None else self._membership.pending()
        ballot: dict[str, Sequence[float]] = {
            "generation": self._transitions.votes(prepared),
            "leave": (float(self._leaving.must_leave),),
            "batch": self._batch.vote(prepared),
            **{voter.name: voter.put() for voter in self._voters},
            **self._models.ballot(is_first=self._generation.group.rank == 0),
        }
        if self._generation.group.members > 1:
            ballot["save"] = self._saving.vote()
        if self._sums_ride:
            ballot["sums"] = self._sums.send()
        return ballot, prepared

    @property
    def _sums_ride(self) -> bool:
        return self._generation.group.world_size > 1

    # ------------------------------------------------------------------ the step's end

    def finish(self, loader: PacingLoader, global_batch: int) -> None:
        """The body of the loop has run for the last micro-batch of a step: count it, then act on what was agreed."""
        adaptation = self._batch.adaptation
        assert adaptation is not None
        self.take_part()
        world_size = self._generation.group.world_size
        agreed = self._vote.finish()
        if agreed is None:
            self._transitions.heal(in_step=True)
            return
        is_left_out = self._leaves_out(agreed)
        if is_left_out:
            self._models.leave_step_out()
        self._record.step_counts()
        self._sums.keep()
        for voter in self._voters:
            voter.take(agreed[voter.name], world_size)
        if world_size > 1 and self._sums.receive(agreed["sums"], world_size):
            self._sums.settle()
        if not is_left_out:
            self._position.schedule_position += self._models.gain
        if self._pacing.paces(loader):
            self._position.progress += adaptation.progress_of(global_batch)
        self._models.end_step(agreed)
        self._position.steps += 1
        self._position.own_steps += 1
        self._position.steps_with_gradients += self._models.took_gradients and not is_left_out
        loader.commit(global_batch)
        now, later = agreed["batch"][:2], agreed["batch"][2:]
        self._batch.use(*now)
        if agreed["leave"][0] > 0:
            self._sums.settle()
            self._saving.leave_preempted()
        if agreed.prepared is not None:
            self._transitions.follow(agreed.prepared, agreed["generation"], later)
        if "save" in agreed:
            self._saving.follow(agreed["save"])
        self._saving.save_if_due()
        self._hinting.tell_if_due()

    # ------------------------------------------------------------------ what the loop's body does in it

    def scheduler_steps_due(self) -> int:
        """Return the learning rate scheduler's moves in this step: as many as small steps would have made."""
        before = self._position.schedule_position + 1e-9
        return math.floor(before + self._models.gain) - math.floor(before)

    def note_forward(self) -> None:
        """A model computes within a step. Raises InvalidTraining where that step cannot be what it should be."""
        if self._habits.trains_in_turns or not self._models.compute_after_an_update:
            return
        if self._models.are_in_a_part:
            raise InvalidTraining(
                "the training loop computes with a model after an optimizer has stepped, as for a GAN, but this step "
                "takes several passes, of which only the last one applies updates: what comes after them would see "
                "the old weights. Allow a whole batch at once: leave out gradient_accumulation, and raise the upper "
                "bound of local_bsz_bounds to batch_size"
            )
        self._habits.trains_in_turns = True
        self._batch.forbid_accumulation()
