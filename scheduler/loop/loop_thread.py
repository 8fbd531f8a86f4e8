"""The thread in which the loop's passes are made, one after another, whenever there is news; and what watches it.

Everything else of a scheduler may go on answering while its one thread that decides waits for something that never
comes. Trials train on in the meantime, and the next process takes them over.
"""

from __future__ import annotations

import faulthandler
import logging
import sys
import threading
import time
from collections.abc import Callable

from trials.errors import StoreUnavailable

logger = logging.getLogger(__name__)

TICK_SECONDS = 0.5
"""Longest time between two looks; news from replicas and drivers is acted on at once."""


class LoopThread:
    """Thread that runs the loop's passes.

    ``tick``: one pass. ``may_act``: whether this scheduler is in charge; ``on_deaf``: called when it was not, or could
    not write.
    """

    def __init__(
        self,
        tick: Callable[[], None],
        *,
        may_act: Callable[[], bool],
        on_deaf: Callable[[], None],
        monotonic: Callable[[], float],
    ) -> None:
        self._tick = tick
        self._may_act = may_act
        self._on_deaf = on_deaf
        self._monotonic = monotonic
        self._wake = threading.Event()
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None
        self._came_round_at: float | None = None

    def start(self) -> None:
        self._thread = threading.Thread(target=self._run, name="control-loop", daemon=True)
        self._thread.start()

    @property
    def age(self) -> float:
        """Seconds since the loop last came round; 0 before it has begun, and when it has been told to stop."""
        if self._came_round_at is None or self._stopping.is_set():
            return 0.0
        return self._monotonic() - self._came_round_at

    def wake(self) -> None:
        self._wake.set()

    def stop(self) -> None:
        self._stopping.set()
        self._wake.set()
        if self._thread is not None:
            self._thread.join(timeout=30.0)

    def _run(self) -> None:
        budget = CpuBudget(self._monotonic())
        while not self._stopping.is_set():
            self._came_round_at = self._monotonic()
            self._wake.wait(TICK_SECONDS)
            self._wake.clear()
            if self._stopping.is_set():
                return
            if not self._may_act():
                self._on_deaf()
                continue
            began = time.thread_time()
            try:
                self._tick()
            except StoreUnavailable as error:
                # Trials go on training; what could not be written is seen again at the next tick.
                logger.error("no decisions, because the store cannot be used; trials train on; trying again: %s", error)
                self._on_deaf()
                time.sleep(TICK_SECONDS)
            except Exception:
                logger.exception("tick failed; allocations stay as they are")
                time.sleep(TICK_SECONDS)
            rest = budget.rest_after(time.thread_time() - began, self._monotonic())
            self._stopping.wait(min(TICK_SECONDS, rest))


SHARE = 0.2
"""Share of a core."""
MOST_SAVED_SECONDS = 1.0
"""Most unused CPU seconds that are saved up."""


class CpuBudget:
    """CPU time that the loop may use; times are in seconds, of a clock that does not jump."""

    def __init__(self, now: float) -> None:
        self._saved = MOST_SAVED_SECONDS
        self._counted_at = now

    def rest_after(self, used: float, now: float) -> float:
        """Seconds to rest when so much CPU time has been used since the last call."""
        earned = SHARE * (now - self._counted_at)
        self._counted_at = now
        self._saved = min(MOST_SAVED_SECONDS, self._saved + earned) - used
        return max(0.0, -self._saved / SHARE)


STUCK_SECONDS = 120.0
"""Longer than anything that a look may wait for: a process that is forked, a database that is locked."""
LOOK_SECONDS = 5.0


class Watchdog:
    """Ends the process when its control loop has stopped.

    ``age``: seconds since the loop last came round. A process that was stopped itself judges nobody by that time.
    """

    def __init__(
        self, age: Callable[[], float], on_stuck: Callable[[], None], *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._age = age
        self._on_stuck = on_stuck
        self._clock = clock
        self._looked_at = self._watching_since = clock()

    def start(self) -> None:
        threading.Thread(target=self._run, name="watchdog", daemon=True).start()

    def _run(self) -> None:
        while not self.look():
            time.sleep(LOOK_SECONDS)

    def look(self) -> bool:
        """Call ``on_stuck`` if the loop is stuck; return whether it was."""
        now = self._clock()
        if now - self._looked_at > 2 * LOOK_SECONDS:
            self._watching_since = now
        self._looked_at = now
        age = self._age()
        if min(age, now - self._watching_since) <= STUCK_SECONDS:
            return False
        logger.critical("the control loop has not run for %.0f s: this process is replaced; its threads:", age)
        faulthandler.dump_traceback(sys.stderr, all_threads=True)
        self._on_stuck()
        return True
