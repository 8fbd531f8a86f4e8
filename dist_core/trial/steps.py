"""Steps: one optimizer step of all replicas, from its first reduced gradient to what was decided in it.

A step begins when the loader hands out the first batch of it. The body computes; its last backward pass reduces the
gradients, and launches the round beside them (``StepVote.launch``). The optimizer waits for the round before it
updates (``succeeds``), so that a step counts on all replicas or on none. When the body has run, the step is counted and
its decisions are carried out (``Steps.finish``).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from dist_core.errors import PeerLost
from dist_core.generations.generation import Generation
from dist_core.generations.step_vote import Round, StepVote, Voter
from dist_core.life import Life
from dist_core.state.position import Position
from dist_core.trial.healing import Heals
from dist_core.trial.models import Models
from dist_core.trial.pacing import Pacing
from dist_core.trial.participants import PacingLoader


class SharedStep(Voter):
    """The present step: each replica comes by all of its backward passes, or none of them makes its update.

    A script may leave out a batch, because its loss is no number say, of which each replica sees its own part.
    """

    name = "passes"

    def __init__(self, generation: Generation, models: Models, vote: StepVote) -> None:
        self._generation = generation
        self._models = models
        self._vote = vote
        self.was_left_out = False
        """The latest step that counts made no update."""

    @property
    def reduces(self) -> bool:
        """Tell whether gradients of the present step are being reduced on this replica."""
        return self._vote.reduces

    def succeeds(self) -> bool:
        """Wait for the round of this step; False when the step is broken, or left out, and must not be applied."""
        if self._generation.broken is None:
            self._vote.wait()
        return self._generation.broken is None and not self.is_left_out

    def take_part(self) -> None:
        """Join the step's control reduction.

        If this replica has reduced no gradients, join the others' reductions as well, with zeros.
        """
        if self._vote.reduces or self._generation.group.world_size == 1:
            self._vote.launch()
            return
        self._models.lay_out_buckets()
        self._send_amount()
        self._vote.launch()
        if self._generation.broken is None:
            self._vote.wait()
        if self._generation.broken is None and self.is_left_out:
            self._models.reduce_nothing()

    def _send_amount(self) -> None:
        """Send what this replica's loss would have been a mean over: others may wait for it."""
        amount, group = self._models.unsent_amount, self._generation.group
        if amount is None or self._generation.broken is not None:
            return
        try:
            group.sum_of(amount, what="what losses are means over")
        except PeerLost as error:
            self._generation.mark_broken(str(error))

    def finish(self) -> Round | None:
        """Return what all replicas agreed on in this step; None where one of them is gone."""
        self.take_part()
        return self._vote.finish()

    # ------------------------------------------------------------------ whether it is left out

    @property
    def is_left_out(self) -> bool:
        """Tell whether a replica has left out one of the step's passes; False until the round has been waited for."""
        if self._generation.group.world_size == 1:
            return not self._models.came_by_all_passes
        agreed = self._vote.under_way
        return agreed is not None and agreed.is_over and _leaves_out(agreed[self.name], agreed.world_size)

    def put(self) -> Sequence[float]:
        reduces = self._vote.reduces
        return float(reduces), float(reduces and self._models.came_by_all_passes)

    def take(self, agreed: Sequence[float], world_size: int) -> None:
        alone = world_size == 1
        self.was_left_out = not self._models.came_by_all_passes if alone else _leaves_out(agreed, world_size)
        if self.was_left_out:
            self._models.leave_step_out()


def _leaves_out(agreed: Sequence[float], world_size: int) -> bool:
    """Tell whether some replicas have come through all of the step's passes and others have not."""
    reducing, complete = round(agreed[0]), round(agreed[1])
    return reducing > 0 and complete < world_size


class Steps:
    def __init__(
        self, shared: SharedStep, position: Position, models: Models, pacing: Pacing, healing: Heals, life: Life
    ) -> None:
        self._shared = shared
        self._position = position
        self._models = models
        self._pacing = pacing
        self._healing = healing
        self._life = life

    def finish(self, loader: PacingLoader, global_batch: int) -> None:
        """Count a step whose last micro-batch the loop's body has run for, then act on what was agreed."""
        agreed = self._shared.finish()
        if agreed is None:
            self._healing.heal(in_step=True)
            return
        # What the step was worth, before what was measured in it changes that.
        progress, gain = self._pacing.progress_of(loader, global_batch), self._models.gain
        self._life.step_counts()
        agreed.take()
        left_out = self._shared.was_left_out
        self._position.step_done(
            progress=progress,
            moves=0.0 if left_out else gain,
            took_gradients=self._models.took_gradients and not left_out,
            awaits_update=self._models.await_an_update,
        )
        loader.commit(global_batch)
        agreed.follow()
        self._life.step_ended()

    # ------------------------------------------------------------------ what the loop's body does in it

    def scheduler_steps_due(self) -> int:
        """Return the learning rate scheduler's moves in this step: as many as small steps would have made."""
        before = self._position.schedule_position + 1e-9
        return math.floor(before + self._models.gain) - math.floor(before)

    def note_forward(self, inputs: Any) -> None:
        """Note that a model computes with these inputs; raise InvalidTraining if the step cannot be what it should."""
        self._pacing.habits.refuse_batch_fetched_ahead(inputs)
        if self._pacing.trains_in_turns or not self._models.compute_after_an_update:
            return
        self._pacing.train_in_turns(
            "the training loop uses a model after an optimizer has stepped, as for a GAN, but this step takes several "
            "passes, and only the last one applies updates: the code after the optimizer would use the old weights. "
            "An evaluation in the loop is none of this under torch.no_grad(); else train each batch",
            is_divided=self._models.are_in_a_part,
        )
