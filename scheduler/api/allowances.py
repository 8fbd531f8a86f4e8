"""How many reports and warnings a trial may leave: what is kept for every trial must not grow for ever."""

from __future__ import annotations

import threading
from collections import OrderedDict

MOST_REPORTS_KEPT = 100_000
MOST_WARNINGS = 200
MOST_TRIALS = 8192
"""The trial that was heard of longest ago is forgotten for a further one, and may then leave as many again."""


class Allowance:
    """Counts by trial. Callable from any thread."""

    def __init__(self, most: int) -> None:
        self.most = most
        self._lock = threading.Lock()
        self._taken: OrderedDict[str, int] = OrderedDict()

    def take(self, trial_id: str) -> int:
        """How many are left after this one; negative when it is one too many."""
        with self._lock:
            taken = self._taken.get(trial_id, 0) + 1
            self._taken[trial_id] = taken
            self._taken.move_to_end(trial_id)
            if len(self._taken) > MOST_TRIALS:
                self._taken.popitem(last=False)
            return self.most - taken
