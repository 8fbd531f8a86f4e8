"""ScriptHabits: what a loop does in its body beside training, as far as that decides how its steps are divided."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch

from dist_core.generations.generation import Generation
from dist_core.life import Listener
from dist_core.state.counts import Counts
from dist_core.state.script_variables import ScriptVariables
from dist_core.trial.models import Models
from dist_core.trial.pacing import Pacing
from dist_core.trial.same_weights import MOST_BYTES_KEPT

LOOKED_AT = 3
"""Steps of each loop."""


class ScriptHabits(Listener):
    """Notices a body that keeps an average of the weights, or another copy of them that moves with each step.

    A step that is divided into passes runs its body in each of them, and the average would move in each. What counts
    as a copy: tensors of the script's own that change in a step and have the types and shapes of most weights.
    """

    def __init__(
        self,
        generation: Generation,
        variables: ScriptVariables,
        models: Models,
        pacing: Pacing,
        warn: Callable[[str], None],
    ) -> None:
        self._generation = generation
        self._variables = variables
        self._models = models
        self._pacing = pacing
        self._warn = warn
        self._before: dict[str, tuple[torch.Tensor, Any]] | None = None
        self._left = 0
        self._moves_copy = self._moves_tensors = False
        """The body moves a copy of the weights; any tensors of the script's own."""
        self._left_out: Callable[..., None] | None = None
        """Puts copies of the weights back that moved in a step which made no update."""
        self._repeats = False
        """The present step lost a replica, and its body is about to run again."""
        self._take_back: Callable[..., None] | None = None
        """Puts the script's variables back to what they were before the present step, where they have to move once."""
        self._counts: Counts | None = None
        """Counts of the script's own before the present step; None while no replica can be lost."""
        self._rates: list[tuple[dict[str, Any], dict[str, Any]]] = []
        """Numbers of each group of an optimizer's parameters before the present step."""

    def loop_began(self, *, completed: bool) -> None:
        self._left = LOOKED_AT
        self._before = None if self._moves_copy else self._variables.tensors()
        self._remember()

    def entered(self, rank: int, number: int) -> None:
        # What a joiner was given is nothing that the body has changed.
        if self._before is not None:
            self._before = self._variables.tensors()
        if self._repeats:
            # A survivor may have taken over another one's.
            self._rates = self._rates_now()

    def pass_begins(self) -> None:
        """Refuse a copy of the weights that the body has moved in an earlier pass of the present step."""
        if self._before is not None:
            now = self._variables.tensors()
            copy = self._copy_among(now, self._changed(now))
            if copy is not None:
                self._train_in_turns(copy, is_divided=True)

    def step_counts(self) -> None:
        if self._before is None:
            return
        now = self._variables.tensors()
        changed = self._changed(now)
        self._left -= 1
        self._before = now if self._left else None
        if changed and not self._moves_tensors and sum(now[path][0].nbytes for path in changed) <= MOST_BYTES_KEPT:
            self._moves_tensors = True
            self._variables.look()
        copy = self._copy_among(now, changed)
        if copy is None:
            return
        self._before, self._moves_copy = None, True
        self._variables.look()
        # Else it has moved in the last pass alone, as of a script that asks which one that is.
        if not self._models.are_in_a_part:
            self._train_in_turns(copy, is_divided=False)

    def _changed(self, now: dict[str, tuple[torch.Tensor, Any]]) -> list[str]:
        before = self._before or {}
        return [path for path in now if path in before and now[path][1] != before[path][1]]

    def _copy_among(self, now: dict[str, tuple[torch.Tensor, Any]], changed: list[str]) -> str | None:
        """Return the largest of the changed tensors, if they are like most weights."""
        if not changed or not self._are_like_the_weights([now[path][0] for path in changed]):
            return None
        return max(changed, key=lambda path: now[path][0].numel())

    def _train_in_turns(self, copy: str, *, is_divided: bool) -> None:
        self._pacing.train_in_turns(
            f"the training loop updates a copy of the weights in its body ({copy!r}), as for an average, "
            "but this step takes several passes, and the body runs in each of them. Update the copy in "
            "optimizer.register_step_post_hook(...), or train each batch",
            is_divided=is_divided,
        )

    def step_ended(self) -> None:
        if self._models.were_left_out:
            # Replicas that did not leave their part of the batch out have moved the copy.
            self._models.were_left_out = False
            if self._moves_copy and self._take_back is not None:
                self._left_out = self._take_back
        self._remember()

    @property
    def _keeps(self) -> bool:
        several = self._generation.group.world_size > 1
        return self._moves_copy or self._models.accumulate_by_script or (self._moves_tensors and several)

    def _remember(self) -> None:
        # Also while nobody knows yet: a joiner may come to a step that is left out.
        looks = self._before is not None
        self._take_back = self._variables.remember() if self._keeps or looks else None
        may_repeat = self._generation.group.world_size > 1
        self._counts = Counts() if may_repeat else None
        self._rates = self._rates_now() if may_repeat else []

    def step_repeats(self) -> None:
        """Put sums and rates back, and counts of batches once the body begins to run again."""
        self._models.take_back_gradients()
        self._put_rates_back()
        self._repeats = True
        if self._models.accumulate_by_script:
            self._warn(
                "a replica was lost while the training loop sums gradients over several batches, and the body runs "
                "again for the present batch. A count of batches in a variable is put back; enumerate() counts that "
                "batch twice, so the next update would come a batch early. Count in a variable"
            )

    def step_begins(self) -> None:
        """Undo, before a new step, what the loop body has changed in a step that did not count."""
        if self._left_out is not None:
            self._left_out(copies_only=True)
            self._left_out = None
            self._remember()
        if self._repeats:
            if self._counts is not None:
                self._counts.put_back()
            # The rest of the body has run behind the step that failed.
            self._put_rates_back()
            if self._keeps and self._take_back is not None:
                self._take_back()
        self._repeats = False

    def _put_rates_back(self) -> None:
        for group, numbers in self._rates:
            group.update(numbers)

    def _rates_now(self) -> list[tuple[dict[str, Any], dict[str, Any]]]:
        return [(group, _numbers_in(group)) for model in self._models for group in model.groups_by_hand]

    def _are_like_the_weights(self, changed: list[torch.Tensor]) -> bool:
        trained = list(self._models.trained())
        # What shares their memory, as model.state_dict() does, is no copy.
        places = {each.data_ptr() for each in trained}
        weights = Counter((each.dtype, each.shape) for each in trained)
        found = Counter((each.dtype, each.shape) for each in changed if each.data_ptr() not in places)
        return 2 * (weights & found).total() > weights.total()

    def loop_ended(self) -> None:
        self._before = self._counts = None
        self._rates = []


def _numbers_in(group: dict[str, Any]) -> dict[str, Any]:
    """Return a group's rates and the like; a rate that is a tensor is the optimizer's own affair."""
    return {name: value for name, value in group.items() if type(value) in (int, float, tuple)}
