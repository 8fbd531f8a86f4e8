"""Saving: when a trial's state is written, and by whom."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from dist_core.generations.generation import Generation
from dist_core.generations.step_vote import Voter
from dist_core.life import Listener
from dist_core.state.manifests import PARTS
from dist_core.state.persistence import Persistence
from dist_core.state.position import Position
from dist_core.state.states import ENDED, kept_after


class Saving(Voter, Listener):
    """Checkpoints that all processes of a replica write at the same step, on which they vote."""

    name = "save"

    def __init__(
        self,
        generation: Generation,
        position: Position,
        states: Persistence,
        *,
        request: Callable[[], str] = str,
        announce: Callable[[str, dict[str, Any]], None] = lambda path, body: None,
        keeps_end: bool = False,
        keeps_after: Sequence[int] = (),
    ) -> None:
        """``request``: mark of the scheduler's latest request to save now, and ``announce`` tells it when that is done.

        ``keeps_end``: keep the state that the trial ends with; ``keeps_after``: those after so many epochs.
        """
        self._generation = generation
        self._position = position
        self._states = states
        self._request = request
        self._announce = announce
        self._answered = ""
        self._to_tell = 0
        """Times to say that a checkpoint which was asked for has come further: it can be read, it is on disk."""
        self._keeps_end = keeps_end
        self._keeps_after = keeps_after

    def put(self) -> Sequence[float]:
        if self._generation.group.members == 1:
            return ()
        is_busy = self.is_ours and self._states.checkpoints.is_busy
        return (float(self._generation.group.rank == 0 and self._is_due), float(is_busy))

    def follow(self, agreed: Sequence[float]) -> None:
        if not agreed:
            self._save_if_due()
            return
        is_due, busy = agreed
        if is_due > 0 and not busy and self.is_ours:
            self.save(leaving=False)

    def epoch_ended(self) -> None:
        self._save_if_due()
        if self._position.epoch in self._keeps_after:
            self._keep(kept_after(self._position.epoch))

    def epochs_ended(self) -> None:
        if self._keeps_end:
            self._keep(ENDED)

    def _keep(self, name: str) -> None:
        if self._generation.joined and self._generation.group.replica == 0:
            self._states.keep_apart(name, self._summary())
            self._announce("/saved", {})

    def _save_if_due(self) -> None:
        if self._generation.group.members == 1 and self._is_due:
            self.save(leaving=False)

    @property
    def _is_due(self) -> bool:
        if not self.is_ours or self._position.awaits_update:
            return False
        checkpoints = self._states.checkpoints
        return checkpoints.is_due or (self._request() != self._answered and not checkpoints.is_busy)

    @property
    def is_ours(self) -> bool:
        """Tell whether this replica writes for the trial, and has something that can be resumed from."""
        generation = self._generation
        return generation.group.replica == 0 and generation.joined and not self._position.is_past_the_end

    def save(self, *, leaving: bool, wait: bool = False) -> None:
        """Write all registered states; the processes of the first replica only, each its part."""
        if self._answered != self._request():
            self._to_tell = 2
        self._answered = self._request()
        self._states.save(self._summary(), leaving=leaving, wait=wait)

    def written(self) -> None:
        """Note that a checkpoint can be read, or is on disk now; called by the thread that writes."""
        if self._to_tell:
            self._to_tell -= 1
            self._announce("/saved", {})

    def _summary(self) -> dict[str, Any]:
        return {
            "epoch": self._position.epoch,
            "steps": self._position.steps,
            "progress": self._position.progress,
            "generation": self._generation.number,
            PARTS: self._generation.group.members,
        }
