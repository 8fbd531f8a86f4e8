"""A device that is not there: passes of a training loop take as long as a speed profile says, whatever this machine.

What replicas compute, send and decide is real; only their time is that of other devices. A machine that is slower than
those shows its own time, and says so.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

from dist_core.goodput import ThroughputParams
from dist_core.goodput.throughput import gradient_seconds, optim_seconds
from dist_core.life import Listener

_LATE = 1.1
"""Passes that take so many times as long as they should are late."""
_JUDGED = 50
_MOST_LATE = 0.2
_OVERHEAD = 0.5
"""Longest part of a pass that the time before it counts towards it; a longer time is the user's own."""


class EmulatedDevice(Listener):
    """Holds passes back until an emulated device would have finished them.

    ``warn``: told once if this machine does not keep up.
    """

    def __init__(
        self,
        params: ThroughputParams,
        warn: Callable[[str], None],
        *,
        clock: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._params = params
        self._warn = warn
        self._clock = clock
        self._sleep = sleep
        self._free_at = float("-inf")
        """Time at which the device has done what it was given."""
        self._late: deque[bool] = deque(maxlen=_JUDGED)
        self._has_warned = False

    def gradient_seconds(self, atomic_batch: int) -> float:
        return float(gradient_seconds(self._params, atomic_batch))

    def pass_seconds(self, nodes: int, replicas: int, atomic_batch: int, *, reduces: bool) -> float:
        """Return the seconds of a forward and backward pass; the last one of a step reduces and applies."""
        if not reduces:
            return self.gradient_seconds(atomic_batch)
        return float(optim_seconds(self._params, nodes, replicas, atomic_batch))

    def entered(self, rank: int, number: int) -> None:
        """Take the time between the last pass and the next one as a pause of the trial's."""
        self._free_at = float("-inf")

    def hold(self, began: float, seconds: float) -> float:
        """Wait until the pass that began then ends on the device; the seconds that it took there, or here if longer."""
        if 0.0 <= began - self._free_at <= _OVERHEAD * seconds:
            began = self._free_at
        ends = began + seconds
        now = self._clock()
        self._note(now > began + _LATE * seconds)
        if now < ends:
            self._sleep(ends - now)
        self._free_at = max(ends, now)
        return self._free_at - began

    def _note(self, late: bool) -> None:
        self._late.append(late)
        if self._has_warned or len(self._late) < _JUDGED or sum(self._late) <= _MOST_LATE * _JUDGED:
            return
        self._has_warned = True
        self._warn(
            f"this machine is too slow for the devices that it emulates: {sum(self._late)} of the last {_JUDGED} "
            "passes took longer than on those devices. Emulate fewer slots, or slower ones (PROFILE@0.5)"
        )
