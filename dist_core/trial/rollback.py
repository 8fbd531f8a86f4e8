"""Rollback: undoes what the user's code does outside of steps where that code is going to run again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from dist_core.generations.generation import Generation
from dist_core.generations.running_sums import ACCUMULATOR_PREFIX, RunningSums
from dist_core.life import Listener
from dist_core.state.parts import local_of
from dist_core.state.persistence import Persistence
from dist_core.state.position import Position
from dist_core.state.script_variables import NAME as VARIABLES
from dist_core.state.script_variables import ScriptVariables

_NOT_OF_USER_CODE = ("adaptation", "checkpoints")
"""States that go on whatever becomes of what code did."""


@dataclass(frozen=True, slots=True)
class _Mark:
    undo: Callable[[], None]
    weights: str
    """A fingerprint of those that are trained, as they were."""


class Rollback(Listener):
    """Restores the model and the states where code outside of steps runs again.

    ``trained``: the parameters that optimizers change.
    """

    def __init__(
        self,
        generation: Generation,
        position: Position,
        states: Persistence,
        sums: RunningSums,
        trained: Callable[[], Iterator[torch.nn.Parameter]],
        variables: ScriptVariables,
    ) -> None:
        self._generation = generation
        self._position = position
        self._states = states
        self._sums = sums
        self._trained = trained
        self._variables = variables
        self._behind_loop: _Mark | None = None
        """Mark where the code between two training loops began, which runs again from there."""

    def forget(self) -> None:
        self._behind_loop = None

    def remember(self, *, leave_out: tuple[str, ...] = ()) -> Callable[[], None]:
        """Return a call that undoes what code does from here on, if its optimizers make no step.

        ``leave_out``: how the names of states begin that stay as they will be then.
        """
        states = self._sums.own(self._states.capture())
        leave_out = (*leave_out, VARIABLES)
        undo = self._states.undo_to({name: each for name, each in states.items() if not name.startswith(leave_out)})
        undo_variables = self._variables.remember()

        def undo_all() -> None:
            undo()
            undo_variables()

        return undo_all

    def epochs_began(self) -> None:
        self.begin_between_loops()

    def loop_ended(self) -> None:
        self.begin_between_loops()

    def epoch_ended(self) -> None:
        self.begin_between_loops()

    def runs_again(self) -> None:
        self.forget()

    def begin_between_loops(self) -> None:
        """Begin code that runs again where the trial leaves, or loses a replica, before its next loop."""
        self._position.take_evaluation(as_made=False)
        self._sums.mark()
        if (self._generation.joined or self._position.is_resumed) and self._states.folder is not None:
            self._behind_loop = _Mark(
                undo=self.remember(leave_out=(*_NOT_OF_USER_CODE, ACCUMULATOR_PREFIX)),
                weights=self._fingerprint_of_weights(),
            )

    @property
    def is_open(self) -> bool:
        """Tell whether what code has done since the last training loop can be undone: weights are not kept twice.

        Who swaps them for an evaluation (averages, the best so far, optimizers that move them) says so elsewhere too.
        """
        return self._behind_loop is None or self._behind_loop.weights == self._fingerprint_of_weights()

    def go_back_behind_loop(self) -> None:
        """Undo what code has done since the last training loop, unless it is in one.

        Sums that it was shown stay as they are.
        """
        if self._position.in_training_loop:
            return
        if self._behind_loop is not None and self.is_open:
            self._behind_loop.undo()
        self._sums.take_back()

    def keep_for_next_run(self) -> None:
        """Copy this replica's states, to go on from when the code has registered them anew."""
        self._states.keep(self._sums.own(self._states.capture()))

    def _fingerprint_of_weights(self) -> str:
        """Return the weights' number and norm as text, in which a norm that is no number equals itself."""
        # Of a sharded one what is here: nobody else need be asked.
        trained = [local_of(each) for each in self._trained()]
        return f"{len(trained)} {float(torch.nn.utils.get_total_norm(trained)) if trained else 0.0!r}"
