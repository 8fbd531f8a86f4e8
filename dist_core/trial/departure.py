"""Departure: whether a replica is to leave, where it looks for that, and what it does last."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Sequence
from typing import Any, NoReturn

from dist_core.errors import EXIT_PREEMPTED, ReplicaExit
from dist_core.generations.generation import Generation
from dist_core.generations.membership import Membership
from dist_core.generations.model_parallel import ModelParallelGroup
from dist_core.generations.running_sums import RunningSums
from dist_core.generations.step_vote import Voter
from dist_core.life import Listener
from dist_core.link.news import News
from dist_core.state.position import Position
from dist_core.trial.rollback import Rollback
from dist_core.trial.saving import Saving


class Departure:
    def __init__(
        self,
        generation: Generation,
        leaving: Leaving,
        saving: Saving,
        rollback: Rollback,
        news: News,
        model_parallel: ModelParallelGroup,
    ) -> None:
        self._generation = generation
        self._leaving = leaving
        self._saving = saving
        self._rollback = rollback
        self._news = news
        self._model_parallel = model_parallel

    # ------------------------------------------------------------------ where nobody votes on it

    def leave_if_asked(self) -> None:
        """Leave with a checkpoint when asked to, outside the step loop (while waiting for an answer).

        A process that is one of several of its replica leaves without: the others are elsewhere, and follow.
        """
        must_leave, is_paused = self._leaving.must_leave, self._leaving.is_paused
        if self._generation.group.members > 1 and (must_leave or is_paused):
            self._news.flush()
            raise ReplicaExit("paused", 0) if is_paused else ReplicaExit("preempted", EXIT_PREEMPTED)
        self._leave_as_asked(must_leave=must_leave, is_paused=is_paused)

    def leave_evaluation_if_asked(self) -> None:
        """Leave between two batches of an evaluation if asked to; it runs from its beginning when the trial goes on.

        All processes of a replica leave behind the same batch; they evaluate the same ones.
        """
        asked = [float(self._leaving.must_leave), float(self._leaving.is_paused)]
        if self._model_parallel.is_met:
            asked = self._model_parallel.sum(asked, self._generation.mark_broken)
        self._leave_as_asked(must_leave=asked[0] > 0, is_paused=asked[1] > 0)

    def _leave_as_asked(self, *, must_leave: bool, is_paused: bool) -> None:
        if must_leave:
            self.leave_preempted()
        if is_paused:
            self.leave_paused()

    # ------------------------------------------------------------------ leaving

    def leave_preempted(self) -> NoReturn:
        self._leave("preempted", EXIT_PREEMPTED)

    def leave_paused(self) -> NoReturn:
        self._leave("paused", 0)

    def make_way(self) -> NoReturn:
        """Leave a trial that trains on, for survivors who may want this core at once."""
        with contextlib.suppress(OSError):
            os.nice(19)
        self._news.flush()
        raise ReplicaExit("left")

    def _leave(self, reason: str, code: int) -> NoReturn:
        self._rollback.go_back_behind_loop()
        if self._saving.is_ours:
            self._leaving.note_saving()
            self._saving.save(leaving=True)
        self._news.flush()
        raise ReplicaExit(reason, code)


class Preemption(Voter):
    """Voter that makes all replicas leave after the same step once one of them is told to save and leave."""

    name = "leave"

    def __init__(self, position: Position, leaving: Leaving, sums: RunningSums, departure: Departure) -> None:
        self._position = position
        self._leaving = leaving
        self._sums = sums
        self._departure = departure

    def put(self) -> Sequence[float]:
        return (float(self._leaving.must_leave),)

    def follow(self, agreed: Sequence[float]) -> None:
        if agreed[0] > 0 and not self._position.awaits_update:
            self._sums.settle()
            self._departure.leave_preempted()


class Leaving(Listener):
    """A replica's duty to save its state and leave, by the scheduler's word or by a signal.

    ``membership``: None for a process without a scheduler, which hears of signals alone.
    """

    def __init__(self, membership: Membership | None) -> None:
        self._membership = membership
        self._leave_requested = False
        self._postponed: BaseException | None = None

    # ------------------------------------------------------------------ who asks

    def heed_signals(self) -> None:
        """Save and leave on SIGTERM, and where there is no scheduler on the first SIGINT.

        Not from threads, which may not ask for signals, nor where somebody handles them already.
        """
        if threading.current_thread() is not threading.main_thread():
            return
        membership = self._membership
        if membership is not None:
            if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
                signal.signal(signal.SIGTERM, lambda *_: membership.told_to_end())
            return

        def leave(*_: Any) -> None:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            self.ask()

        signal.signal(signal.SIGTERM, leave)
        signal.signal(signal.SIGINT, leave)

    def ask(self) -> None:
        """Ask this replica to save and leave at the next place where that is possible."""
        self._leave_requested = True

    @property
    def must_leave(self) -> bool:
        return self._leave_requested or (self._membership is not None and self._membership.must_leave is not None)

    def note_saving(self) -> None:
        """Tell the scheduler that this replica writes its last checkpoint, which may take a while."""
        if self._membership is not None:
            self._membership.saving = True

    @property
    def is_paused(self) -> bool:
        """Tell whether the next generation has no members."""
        pending = None if self._membership is None else self._membership.pending()
        return pending is not None and not pending.generation.members

    # ------------------------------------------------------------------ errors that have to wait

    def postpone(self, error: BaseException) -> None:
        """Keep what was raised where Python would swallow it (a generator being closed); raised at the next chance."""
        self._postponed = self._postponed or error

    def raise_postponed(self) -> None:
        error, self._postponed = self._postponed, None
        if error is not None:
            raise error

    def runs_again(self) -> None:
        """Forget an exit: the code that raised it is over."""
        self._postponed = None
