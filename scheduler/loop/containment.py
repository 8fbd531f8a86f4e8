"""Containment: what goes wrong with one trial does not keep the others from being looked after."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from trials.errors import StoreUnavailable
from trials.record import Reason, TrialRecord

logger = logging.getLogger(__name__)

MOST_FAILURES = 20


class Containment:
    """``give_up``: ends a trial, for this reason. Only a mistake of ours leads here.

    The trial is tried again at the next looks, and ends when that never helps.
    """

    def __init__(self, give_up: Callable[[TrialRecord, Reason], None]) -> None:
        self._give_up = give_up
        self._failures: dict[tuple[str, str], int] = {}

    @contextmanager
    def around(self, trial: TrialRecord, step: str) -> Iterator[None]:
        """What is done within for the trial; ``step`` tells one kind of work from another."""
        try:
            yield
        except StoreUnavailable:
            raise
        except Exception as error:
            key = trial.trial_id, step
            failures = self._failures[key] = self._failures.get(key, 0) + 1
            logger.exception("trial cannot be handled trial=%s times=%d", trial.trial_id, failures)
            if failures == MOST_FAILURES and not trial.state.is_final:
                sentence = f"the scheduler cannot handle it ({type(error).__name__}: {error}); its log tells more"
                self._give_up(trial, Reason(code="internal_error", sentence=sentence))
        else:
            self._failures.pop((trial.trial_id, step), None)

    def forget(self, trial_id: str) -> None:
        for key in [key for key in self._failures if key[0] == trial_id]:
            del self._failures[key]
