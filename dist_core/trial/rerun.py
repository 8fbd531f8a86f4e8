"""Rerun: when the user's code runs again from its top in the same process, and what it goes on from."""

from __future__ import annotations

from collections.abc import Callable

from dist_core.errors import JoinAgain, PeerLost, RunAgain
from dist_core.generations.generation import Generation
from dist_core.generations.running_sums import RunningSums
from dist_core.link.news import News
from dist_core.state.memory_limit import is_out_of_memory
from dist_core.state.persistence import Persistence
from dist_core.state.position import Position
from dist_core.trial.batch_agreement import BatchAgreement
from dist_core.trial.loops import Loops
from dist_core.trial.rollback import Rollback


class Rerun:
    """``forget``: told when the pieces are to forget what the first run has made with them."""

    def __init__(
        self,
        generation: Generation,
        position: Position,
        states: Persistence,
        batch: BatchAgreement,
        sums: RunningSums,
        rollback: Rollback,
        loops: Loops,
        news: News,
        forget: Callable[[], None],
    ) -> None:
        self._generation = generation
        self._position = position
        self._states = states
        self._batch = batch
        self._sums = sums
        self._rollback = rollback
        self._loops = loops
        self._news = news
        self._forget = forget

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
        self._forget()
        self._states.has_looked = False
        self._generation.begin_anew()

    def _go_on(self, *, in_loop: bool) -> None:
        """Go on where the trial stands; the code builds everything anew.

        ``in_loop``: within the loop that it has left.
        """
        if not self._position.in_training_loop:
            self._rollback.go_back_behind_loop()
        if in_loop:
            self._loops.go_back_into_left_loop()
        self._states.keep(self._sums.own(self._states.capture()))
        self._forget()
        self._generation.joining = False

    def _shrinks(self, error: BaseException) -> bool:
        """A batch did not fit into memory: note the bound, and whether the user's code may run again from its top.

        Nothing is lost: weights are as of the last complete step. A replica among others leaves instead, and is
        replaced by one that knows the bound. Raises PeerLost for that, and InvalidTraining when no smaller batch is
        allowed.
        """
        if self._batch.adaptation is None or not self._generation.joined:
            return False
        learnt = self._batch.shrink(error)
        self._news.warn(f"{learnt} ({error})")
        if self._generation.group.world_size > 1:
            raise PeerLost(f"{learnt}; this replica leaves for one that knows it")
        return True
