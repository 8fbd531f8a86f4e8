"""Reports of a trial on their way to its study: they travel with its next question, or by themselves a moment later.

Until the study has them they are part of the trial's state, so that a checkpoint which counts one holds it too. Every
replica remembers them: one that takes over tells what its predecessor may not have told. The driver keeps the first
value of a step, so one that comes twice counts once.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypedDict

from dist_core.errors import ControlChannelError

ALONE_AFTER_SECONDS = 0.02
"""A question follows a report soon, or not at all."""
LOOK_SECONDS = 0.5
MOST_KEPT = 1000
"""Most reports that no question has taken along; a trial that reports faster than they travel waits."""


class Report(TypedDict):
    step: int
    value: float
    progress: float


class PendingReports:
    """Reports of a trial that wait for its next question, or for a moment, to be sent.

    ``send`` passes reports on, from a thread, and raises what the study raised. ``tells``: whether we are to.

    ``look_up`` is called now and then by whoever waits here, to see whether it should leave instead.
    """

    def __init__(
        self, send: Callable[[Sequence[Report]], None], tells: Callable[[], bool], look_up: Callable[[], None]
    ) -> None:
        self._send = send
        self._may_report = tells
        self._look_up = look_up
        self._changed = threading.Condition()
        self._pending: deque[Report] = deque(maxlen=MOST_KEPT)
        self._travelling: list[Report] = []
        self._error: Exception | None = None
        self._thread: threading.Thread | None = None
        self._closed = False

    @property
    def are_settled(self) -> bool:
        """The study has all of them, and nothing went wrong."""
        with self._changed:
            return not (self._pending or self._travelling or self._error)

    def add(self, report: Report) -> None:
        """Add a report; raise what an earlier one has raised meanwhile."""
        tells = self._may_report()
        if tells and self._thread is None:
            self._thread = threading.Thread(target=self._run, name="optuna-reports", daemon=True)
            self._thread.start()
        with self._when(lambda: not tells or len(self._pending) < MOST_KEPT):
            self._pending.append(report)
            self._changed.notify_all()

    def take(self) -> list[Report]:
        """Return all pending reports, to travel with a question; ``arrived`` or ``give_back`` follows.

        Raises as ``add``.
        """
        with self._when(lambda: not self._travelling):
            self._travelling = [*self._pending]
            self._pending.clear()
            return list(self._travelling)

    def arrived(self) -> None:
        with self._changed:
            self._travelling = []
            self._changed.notify_all()

    def give_back(self) -> None:
        """Give reports back: nobody knows whether they arrived."""
        with self._changed:
            self._pending.extendleft(reversed(self._travelling))
            self._travelling = []
            self._changed.notify_all()

    def close(self) -> None:
        """Report nothing more."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def forget(self) -> None:
        """Forget the pending reports: another replica has told them."""
        with self._changed:
            self._pending.clear()
            self._changed.notify_all()

    @contextmanager
    def _when(self, condition: Callable[[], bool]) -> Iterator[None]:
        """Run the block once the condition holds, before anybody else can change that; raise what has gone wrong."""
        while True:
            with self._changed:
                if self._changed.wait_for(lambda: self._error is not None or condition(), LOOK_SECONDS):
                    if self._error is not None:
                        error, self._error = self._error, None
                        raise error
                    yield
                    return
            self._look_up()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(
                    lambda: self._closed or (bool(self._pending) and not self._travelling and self._error is None)
                )
                if self._closed:
                    return
                if self._changed.wait_for(lambda: not self._pending or bool(self._travelling), ALONE_AFTER_SECONDS):
                    continue
                self._travelling = [*self._pending]
                self._pending.clear()
            try:
                self._send(self._travelling)
            except Exception as error:
                with self._changed:
                    # Raised where the trial reports or asks next.
                    self._error = error
                    if isinstance(error, ControlChannelError):
                        # Nobody has heard them: they stay a part of the trial's state.
                        self.give_back()
                    else:
                        self.arrived()
            else:
                self.arrived()

    # ------------------------------------------------------------------ a part of the trial's state

    def state_dict(self) -> dict[str, Any]:
        with self._changed:
            return {"untold": [dict(each) for each in (*self._travelling, *self._pending)]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        with self._changed:
            self._pending.clear()
        for report in state["untold"]:
            self.add(Report(step=report["step"], value=report["value"], progress=report["progress"]))
