"""Saving: when a trial's state is written, and what a replica does last."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

from dist_core.errors import EXIT_PREEMPTED, ReplicaExit
from dist_core.generations.generation import Generation
from dist_core.generations.membership import Membership
from dist_core.generations.model_parallel import ModelParallelGroup
from dist_core.link.news import News
from dist_core.state.parts import PARTS
from dist_core.state.persistence import Persistence
from dist_core.state.position import Position
from dist_core.trial.leaving import Leaving
from dist_core.trial.rollback import Rollback


class Saving:
    def __init__(
        self,
        generation: Generation,
        position: Position,
        states: Persistence,
        leaving: Leaving,
        rollback: Rollback,
        news: News,
        membership: Membership | None,
        model_parallel: ModelParallelGroup,
    ) -> None:
        self._generation = generation
        self._position = position
        self._states = states
        self._leaving = leaving
        self._rollback = rollback
        self._news = news
        self._membership = membership
        self._model_parallel = model_parallel

    # ------------------------------------------------------------------ while it trains

    def save_if_due(self) -> None:
        if self._generation.group.members == 1 and self._is_due:
            self.save(leaving=False)

    def vote(self) -> Sequence[float]:
        """Return this process's vote where all processes of a replica have to write at the same step."""
        is_busy = self._is_ours and self._states.checkpoints.is_busy
        return (float(self._generation.group.rank == 0 and self._is_due), float(is_busy))

    def follow(self, votes: Sequence[float]) -> None:
        is_due, busy = votes
        if is_due > 0 and not busy and self._is_ours:
            self.save(leaving=False)

    @property
    def _is_due(self) -> bool:
        return self._is_ours and self._states.checkpoints.is_due

    @property
    def _is_ours(self) -> bool:
        """Tell whether this replica writes for the trial, and has something that can be resumed from."""
        return self._generation.group.replica == 0 and self._generation.joined and not self._position.is_past_the_end

    def save(self, *, leaving: bool, wait: bool = False) -> None:
        """Write all registered states; the processes of the first replica only, each its part."""
        summary = {
            "epoch": self._position.epoch,
            "steps": self._position.steps,
            "progress": self._position.progress,
            "generation": self._generation.number,
            PARTS: self._generation.group.members,
        }
        self._states.save(summary, leaving=leaving, wait=wait)

    # ------------------------------------------------------------------ where it ends

    def leave_if_asked(self) -> None:
        """Outside the step loop (while waiting for an answer): leave with a checkpoint when asked to.

        A process that is one of several of its replica leaves without: the others are elsewhere, and follow.
        """
        must_leave, is_paused = self._leaving.must_leave, self._leaving.is_paused
        if self._generation.group.members > 1 and (must_leave or is_paused):
            self._news.flush()
            raise ReplicaExit("paused", 0) if is_paused else ReplicaExit("preempted", EXIT_PREEMPTED)
        self._leave_as_asked(must_leave=must_leave, is_paused=is_paused)

    def leave_evaluation_if_asked(self) -> None:
        """Between two batches of an evaluation, which runs from its beginning when the trial goes on.

        All processes of a replica leave behind the same batch; they evaluate the same ones.
        """
        if self._position.in_training_loop:
            return
        asked = [float(self._leaving.must_leave), float(self._leaving.is_paused)]
        if self._model_parallel.is_met:
            asked = self._model_parallel.sum(asked, self._generation.mark_broken)
        self._leave_as_asked(must_leave=asked[0] > 0, is_paused=asked[1] > 0)

    def _leave_as_asked(self, *, must_leave: bool, is_paused: bool) -> None:
        if must_leave:
            self.leave_preempted()
        if is_paused:
            self.leave_paused()

    def leave_preempted(self) -> NoReturn:
        self._leave("preempted", EXIT_PREEMPTED)

    def leave_paused(self) -> NoReturn:
        self._leave("paused", 0)

    def _leave(self, reason: str, code: int) -> NoReturn:
        if not self._position.in_training_loop:
            self._rollback.go_back_behind_loop()
        if self._is_ours:
            if self._membership is not None:
                self._membership.saving = True
            self.save(leaving=True)
        self._news.flush()
        raise ReplicaExit(reason, code)
