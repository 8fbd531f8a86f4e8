"""SizeCosts: what it costs to compute with a batch size for the first time, and when that is repaid.

A compiled model compiles anew for sizes it has not seen, and some kernels are tuned at first use. The first step at a
new size takes longer by that, which says what the next new size will cost. Sizes that were seen are free.
"""

from __future__ import annotations

from statistics import median

STEPS_TO_COMPARE = 3
"""The first step at a size, against the median of the following ones."""


class SizeCosts:
    def __init__(self, now: float) -> None:
        """``now``: seconds on a clock that never goes back, as everywhere here."""
        self.seconds = 0.0
        """Of the latest new size."""
        self._steps: dict[int, list[float]] = {}
        self._last_new = now
        self._generation: int | None = None

    def note(self, atomic: int, seconds: float, now: float, *, generation: int, compiles: bool) -> None:
        """A pass at this size took so long.

        The first size of all begins with what is started once in a process, unless there is a model that ``compiles``.
        A generation's first step waits for others, which is no cost of its size.
        """
        is_first_size = not self._steps or (len(self._steps) == 1 and atomic in self._steps)
        is_new = atomic not in self._steps
        steps = self._steps.setdefault(atomic, [])
        if is_new:
            self._last_new = now
        entered, self._generation = generation != self._generation and not is_first_size, generation
        if entered and is_new:
            # Seen, with no word on what it cost.
            steps += [0.0] * STEPS_TO_COMPARE
        if len(steps) == STEPS_TO_COMPARE:
            return
        steps.append(seconds)
        if len(steps) == STEPS_TO_COMPARE and (compiles or not is_first_size):
            self.seconds = max(0.0, steps[0] - median(steps[1:]))

    def is_repaid(self, atomic: int, ratio: float, now: float) -> bool:
        """Whether a size with ``ratio`` times the present goodput makes up for its cost.

        In as long as the latest new size has been in use by now: so changes that cost come at intervals in which the
        one before has paid.
        """
        if atomic in self._steps or self.seconds == 0.0:
            return True
        return ratio > 1.0 and (now - self._last_new) * (1.0 - 1.0 / ratio) > self.seconds
