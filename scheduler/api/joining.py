"""Choice of a joiner's epoch: the first that is not over before it stands at its first training step."""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from dataclasses import dataclass, field

from dist_core.goodput import Hints

DEFAULT_JOIN_SECONDS = 0.5
"""Believed of a joiner's way from its question to its first training step until its trial has shown its own."""
ENTER_SECONDS = 0.3
"""Seconds until all of the next generation have found each other and enter it."""
MARGIN = 1.5
"""A joiner that comes too late has to run its code again; one that aims too far waits, its slot idle."""
SEEN_JOINERS = 4
MOST_TOLD = 256
MOST_PROCESSES = 1 << 16
"""Most processes of a trial whose attempts are kept; one that is forgotten counts as behind."""
MOST_TRIALS = 4096
"""The trial that was heard of longest ago is forgotten for a further one."""


@dataclass(slots=True)
class _Trial:
    hinted_at: float | None = None
    took: deque[float] = field(default_factory=lambda: deque(maxlen=SEEN_JOINERS))
    told: OrderedDict[tuple[str, int], int | None] = field(default_factory=OrderedDict)
    stood: OrderedDict[str, int] = field(default_factory=OrderedDict)
    """Latest attempt in which each process stood at its first training step."""
    asked: OrderedDict[str, int] = field(default_factory=OrderedDict)
    """Latest attempt that any process of a replica has begun, by replica of several processes."""


class Joining:
    """Times that each trial's joiners took, and the age of what is known of its place. Callable from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._trials: OrderedDict[str, _Trial] = OrderedDict()

    def note_hints(self, trial_id: str, now: float) -> None:
        with self._lock:
            self._of(trial_id).hinted_at = now

    def note_ready(self, trial_id: str, seconds: float) -> None:
        """Note how long a joiner took from its question to its first training step."""
        with self._lock:
            self._of(trial_id).took.append(seconds)

    def alike(self, trial_id: str, asked: tuple[str, int], epoch: int | None) -> int | None:
        """Return one answer to all processes of a replica: what the first of them to ask so often was told.

        ``asked``: which replica, and how often.
        """
        with self._lock:
            told = self._of(trial_id).told
            while len(told) >= MOST_TOLD:
                told.popitem(last=False)
            return told.setdefault(asked, epoch)

    def note_asked(self, trial_id: str, whole: str, attempt: int) -> None:
        """Note that a process of that replica begins an attempt; the others have to follow."""
        with self._lock:
            _note_latest(self._of(trial_id).asked, whole, attempt)

    def note_stands(self, trial_id: str, replica_id: str, attempt: int) -> None:
        with self._lock:
            _note_latest(self._of(trial_id).stood, replica_id, attempt)

    def is_behind(self, trial_id: str, replica_id: str, whole: str) -> bool:
        """Tell whether this process stands in an attempt that another one of its replica has left."""
        with self._lock:
            trial = self._of(trial_id)
            return trial.stood.get(replica_id, 0) < trial.asked.get(whole, 0)

    def attempt_after(self, trial_id: str, replica_id: str) -> int | None:
        """Return the first attempt that is none of those in which the process stood.

        None where it has told of none.
        """
        with self._lock:
            stood = self._of(trial_id).stood.get(replica_id)
            return None if stood is None else stood + 1

    def aim(self, trial_id: str, hints: Hints | None, now: float) -> int:
        """Return the epoch for a joiner that asks now; 0 for one of a trial that has not told where it is."""
        if hints is None:
            return 0
        with self._lock:
            trial = self._of(trial_id)
            needs = max(trial.took, default=DEFAULT_JOIN_SECONDS) + ENTER_SECONDS
            age = 0.0 if trial.hinted_at is None else max(0.0, now - trial.hinted_at)
        return reachable_epoch(hints, age, MARGIN * needs)

    def _of(self, trial_id: str) -> _Trial:
        trial = self._trials.setdefault(trial_id, _Trial())
        self._trials.move_to_end(trial_id)
        while len(self._trials) > MOST_TRIALS:
            self._trials.popitem(last=False)
        return trial


def _note_latest(latest: OrderedDict[str, int], name: str, attempt: int) -> None:
    latest[name] = max(attempt, latest.pop(name, 0))
    while len(latest) > MOST_PROCESSES:
        latest.popitem(last=False)


def reachable_epoch(hints: Hints, age: float, needs: float) -> int:
    """First epoch that still lasts for ``needs`` seconds, by hints that are ``age`` seconds old."""
    if hints.epoch_seconds is None or hints.epoch_seconds <= 0:
        return hints.epoch if hints.epoch_fraction < 0.5 else hints.epoch + 1
    # Past its end a trial may evaluate for as long as it likes: it is not believed to be further than that.
    left = max(0.0, hints.epoch_seconds * (1.0 - hints.epoch_fraction) - age)
    if left > needs:
        return hints.epoch
    return hints.epoch + 1 + int((needs - left) / hints.epoch_seconds)
