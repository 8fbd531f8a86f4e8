"""Rerun: when the user's code runs again from its top in the same process, and what it goes on from."""

from __future__ import annotations

from dist_core.errors import JoinAgain, PeerLost, RunAgain
from dist_core.generations.generation import Generation
from dist_core.life import Life
from dist_core.link.news import News
from dist_core.state.memory_limit import is_out_of_memory
from dist_core.trial.batch_agreement import BatchAgreement
from dist_core.trial.loops import Loops
from dist_core.trial.rollback import Rollback


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
