"""Retention on a scheduler of one machine: trials that ended long ago go, with their reports, history and logs.

Called after each look of the control loop, from its thread; every step is safe to repeat and to leave out.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections import deque
from collections.abc import Callable, Sequence

from scheduler.loop.control_loop import ControlLoop
from trials.errors import StoreUnavailable
from trials.record import Study, TrialRecord
from trials.store import TrialStore

SWEEP_SECONDS = 60.0
MOST_AT_ONCE = 50
"""Trials that are forgotten in one go: replicas wait for the database in the meantime."""

logger = logging.getLogger(__name__)


def expired(
    trials: Sequence[TrialRecord], studies: Sequence[Study], now: float, keep_seconds: float
) -> list[TrialRecord]:
    """Trials that ended longer ago than that, oldest first.

    A study that has a driver may yet compare its trials, and one with a budget is judged by what they have used.
    """
    keeps = {study.name for study in studies if study.owner is not None or study.terms.budget_slot_hours is not None}
    over = [
        (trial.finished_at, trial)
        for trial in trials
        if trial.state.is_final and trial.finished_at is not None and trial.spec.study not in keeps
    ]
    return [trial for at, trial in sorted(over, key=lambda pair: pair[0]) if now - at > keep_seconds]


def abandoned(trials: Sequence[TrialRecord], studies: Sequence[Study], now: float, keep_seconds: float) -> list[Study]:
    """Studies without trials that nobody has driven for so long."""
    used = {trial.spec.study for trial in trials}
    return [
        study
        for study in studies
        if study.name not in used and study.owner is None and now - (study.owner_seen_at or now) > keep_seconds
    ]


class Retention:
    """Forgets trials that ended long ago, and those that a user removes.

    ``keep_seconds``: 0 keeps everything.
    """

    def __init__(
        self,
        store: TrialStore,
        loop: ControlLoop,
        keep_seconds: float,
        *,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._store = store
        self._loop = loop
        self._keep_seconds = keep_seconds
        self._clock = clock
        self._swept_at = float("-inf")
        self._wanted: deque[str] = deque()

    def forget(self, trial_ids: Sequence[str]) -> None:
        """Forget trials at the next looks, whatever their age; from any thread."""
        self._wanted.extend(trial_ids)
        self._loop.wake()

    def look(self) -> None:
        now = self._clock()
        if self._wanted:
            try:
                self._forget_wanted()
            except StoreUnavailable as error:
                logger.warning("trials not deleted yet, trying again: %s", error)
        if not self._keep_seconds or now - self._swept_at < SWEEP_SECONDS:
            return
        self._swept_at = now
        try:
            self._sweep(now)
        except StoreUnavailable as error:
            logger.warning("old trials not deleted yet, trying again: %s", error)

    def _forget_wanted(self) -> None:
        """Forget a part of the wanted trials, which is taken from the list when it is done."""
        some = list(itertools.islice(self._wanted, MOST_AT_ONCE))
        over = {trial.trial_id for trial in self._store.trials() if trial.state.is_final}
        mine = [trial_id for trial_id in some if trial_id in over]
        self._store.forget_trials(mine)
        for trial_id in mine:
            self._loop.forget_trial(trial_id)
        for _ in some:
            self._wanted.popleft()
        if self._wanted:
            self._loop.wake()

    def _sweep(self, now: float) -> None:
        trials, studies = self._store.trials(), self._store.studies()
        old = expired(trials, studies, now, self._keep_seconds)[:MOST_AT_ONCE]
        if old:
            self._store.forget_trials([trial.trial_id for trial in old])
            for trial in old:
                self._loop.forget_trial(trial.trial_id)
            logger.info("deleted %d trials that ended more than %.0f days ago", len(old), self._keep_seconds / 86400.0)
        for study in abandoned(trials, studies, now, self._keep_seconds):
            self._store.forget_study(study.name)
            self._loop.decisions.forget_study(study.name)
