"""Leaving: whether this replica is to save and go, and what was raised where nobody could hear of it."""

from __future__ import annotations

import signal
import threading
from typing import Any

from dist_core.generations.membership import Membership
from dist_core.life import Listener


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
