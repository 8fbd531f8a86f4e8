"""Notices a control loop that has stopped coming round, and has the process replaced.

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

STUCK_SECONDS = 120.0
"""Longer than anything that a look may wait for: a process that is forked, a database that is locked."""
LOOK_SECONDS = 5.0

logger = logging.getLogger(__name__)


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
