"""Inheritance: a trial that names a parent begins with the parent's state.

The state is the parent's newest checkpoint, put into the child's own folder: a child restores it as any trial restores
its own. A parent that trains is asked to save first, between two steps, and trains on; the child's replicas start then,
and wait for the state where they see the scheduler's files, else they start when it is there. Level-triggered: what is
asked for is worked out anew at each look, so nothing is lost with a scheduler.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from scheduler.loop.journal import Journal
from scheduler.loop.trial_files import TrialFiles
from trials.errors import TrialsError, UnknownTrial
from trials.record import TrialRecord
from trials.states import TrialState
from trials.store import TrialStore

SAVE_SECONDS = 60.0
"""Longest time to wait for a new checkpoint of a parent that has an older one: it may be evaluating."""


class ParentStateMissing(TrialsError):
    """The parent has no state that its child could begin with, and never will have."""


class Inheritance:
    def __init__(
        self, store: TrialStore, files: TrialFiles, journal: Journal, *, on_release: Callable[[], None]
    ) -> None:
        """``on_release``: told that a trial which was on hold may have slots."""
        self._on_release = on_release
        self._store = store
        self._files = files
        self._journal = journal
        self._asked: dict[str, tuple[str, float]] = {}
        """Requests to save by parent: its newest checkpoint at that moment, and the moment."""

    @property
    def asked(self) -> Mapping[str, str]:
        """Parents whose replicas are to save now, each with a mark that tells one request from another."""
        return {parent: f"after {name or 'none'}" for parent, (name, _) in tuple(self._asked.items())}

    def forget(self, trial_id: str) -> None:
        self._asked.pop(trial_id, None)

    def is_settled(self, child: TrialRecord, now: float) -> bool:
        """Tell whether the trial has the state that it begins with. Raises ParentStateMissing if it never will."""
        if not self._files.waits_for_state(child):
            return True
        if child.spec.parent_epoch:
            return self._has_shared(child)
        parent_id = child.spec.parent
        try:
            parent = self._store.trial(parent_id)
        except UnknownTrial:
            raise ParentStateMissing(f"its parent {parent_id} has been removed, and its state with it") from None
        if parent.members and not parent.state.is_final and not self._has_saved(parent, now):
            self._journal.note_waits_for(
                child.trial_id, "inherits", f"waits until its parent {parent_id} has saved its state"
            )
            return False
        if self._files.hand_on(child):
            self._asked.pop(parent_id, None)
            return True
        if parent.state.is_final:
            raise ParentStateMissing(f"its parent {parent_id} ended, and no state of it was kept")
        if parent.state is TrialState.RUNNING and not parent.published:
            raise ParentStateMissing(
                f"its parent {parent_id} runs code that does not use dist_core, and saves no state"
            )
        self._journal.note_waits_for(child.trial_id, "inherits", f"waits until its parent {parent_id} has trained")
        return False

    def _has_shared(self, child: TrialRecord) -> bool:
        """Tell whether a trial may start: its shared epochs are trained, or it has to train them itself.

        Until then it is on hold.
        """
        if not self._files.hand_on(child):
            try:
                parent = self._store.trial(child.spec.parent)
                is_coming = not parent.state.is_final
            except UnknownTrial:
                is_coming = False
            if is_coming:
                if child.hold is None:
                    self._store.hold([child.trial_id], self._sharing(child))
                return False
        if child.hold == self._sharing(child):
            self._store.release([child.trial_id])
            self._on_release()
        return True

    @staticmethod
    def _sharing(child: TrialRecord) -> str:
        return f"waits until {child.spec.parent} has trained the {child.spec.parent_epoch} epochs that they share"

    def _has_saved(self, parent: TrialRecord, now: float) -> bool:
        """Ask a parent that trains to save; True once it has, or is not going to."""
        newest = self._files.newest_checkpoint(parent.trial_id)
        before, since = self._asked.setdefault(parent.trial_id, (newest, now))
        return newest != before or (bool(newest) and now - since > SAVE_SECONDS)
