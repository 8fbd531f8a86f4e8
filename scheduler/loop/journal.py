"""Journal: writes what becomes of trials, their states and their histories; nothing else in the loop does."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from scheduler.snapshot import Grant, Policy
from trials.record import Reason, TrialRecord
from trials.states import TrialEvent, TrialState, next_state
from trials.store import TrialStore
from trials.store.base import HistoryEntry

logger = logging.getLogger(__name__)

_WHO = {
    TrialEvent.VALUE_RETURNED: "trial",
    TrialEvent.PRUNED_BY_TUNER: "tuner",
    TrialEvent.CANCELLED_BY_OWNER: "owner",
}
"""Whose doing an event is, where it is not the scheduler's."""


class Journal:
    def __init__(self, store: TrialStore, policy: Policy) -> None:
        self._store = store
        self._by_policy = f"policy {policy.name}"

    def move(
        self,
        trial: TrialRecord,
        event: TrialEvent,
        reason: Reason,
        now: float,
        *,
        numbers: Mapping[str, float] = MappingProxyType({}),
        **changes: object,
    ) -> None:
        """Move the trial along the transition table, with other fields of its record by name."""
        state = next_state(trial.state, event)
        self._store.save_trial(replace(trial, state=state, reason=reason, **changes))  # type: ignore[arg-type]  # by name
        self.note(trial.trial_id, state.value, reason, now, who=_WHO.get(event, "scheduler"), numbers=numbers)
        if state is not TrialState.RESCALING:
            logger.info("trial %s trial=%s reason=%s: %s", state.value, trial.trial_id, reason.code, reason.sentence)

    def note(
        self,
        trial_id: str,
        what: str,
        reason: Reason,
        now: float,
        *,
        who: str = "scheduler",
        numbers: Mapping[str, float] = MappingProxyType({}),
    ) -> None:
        """Write an event into the trial's history; ``numbers``: what was weighed."""
        self._store.add_history(
            HistoryEntry(at=now, trial_id=trial_id, what=what, reason=reason, who=who, numbers=_finite(numbers))
        )

    def warn(self, trial_id: str, code: str, sentence: str, now: float) -> None:
        self.note(trial_id, "warning", Reason(code=code, sentence=sentence), now)

    def note_waiting(self, trial: TrialRecord, grant: Grant, now: float) -> None:
        """Keep a waiting trial's reason current; changes of size are noted when they are acted on."""
        waits = trial.state in (TrialState.PENDING, TrialState.PAUSED) and grant.slots == 0
        if waits and grant.reason.sentence != trial.reason.sentence:
            self._store.save_trial(replace(self._store.trial(trial.trial_id), reason=grant.reason))
            self.note(trial.trial_id, "waits", grant.reason, now, who=self._by_policy, numbers=grant.numbers)
            logger.info("trial waits trial=%s reason=%s", trial.trial_id, grant.reason.sentence)

    def note_rescale(
        self,
        trial: TrialRecord,
        reason: Reason,
        before: int,
        after: int,
        now: float,
        *,
        numbers: Mapping[str, float] = MappingProxyType({}),
    ) -> None:
        """Write a rescale into the trial's history; ``numbers``: what was weighed, where it was decided."""
        self._store.save_trial(replace(trial, reason=reason))
        who = "scheduler" if reason.code == "replica_lost" else self._by_policy
        size = trial.slots_per_replica
        before, after = before // size, after // size
        what = f"{before} -> {after} replicas" if before != after else f"moves (size {after})"
        self.note(trial.trial_id, what, reason, now, who=who, numbers=numbers)
        logger.info(
            "trial rescales trial=%s replicas=%d->%d reason=%s: %s",
            trial.trial_id,
            before,
            after,
            reason.code,
            reason.sentence,
        )

    def note_waits_for(self, trial_id: str, code: str, sentence: str) -> None:
        present, reason = self._store.trial(trial_id), Reason(code=code, sentence=sentence)
        if present.state is TrialState.PENDING and present.reason != reason:
            self._store.save_trial(replace(present, reason=reason))

    def note_launch_failed(self, trial_id: str, error: str, now: float) -> None:
        reason = Reason(code="launch_failed", sentence=f"a replica could not be started: {error}")
        present = self._store.trial(trial_id)
        if present.reason != reason:
            self.note(trial_id, "warning", reason, now)
            self._store.save_trial(replace(present, reason=reason))


def _finite(numbers: Mapping[str, float]) -> dict[str, float]:
    """Leave out numbers that JSON has no word for."""
    return {name: float(value) for name, value in numbers.items() if math.isfinite(value)}
