"""Decisions: what the policy was asked, and what it answered."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

from scheduler.knowledge.coming import Plans
from scheduler.knowledge.observer import Observer
from scheduler.loop.backoff import Backoff
from scheduler.snapshot import Grant, Policy, Snapshot, check_grants
from trials.errors import StoreUnavailable
from trials.record import TrialRecord

logger = logging.getLogger(__name__)


class Decisions:
    """The policy is asked by the loop's thread alone; the answer is read by any."""

    def __init__(self, policy: Policy, observer: Observer, backoff: Backoff, *, every_seconds: float) -> None:
        self.policy = policy
        self._observer = observer
        self._backoff = backoff
        self.every_seconds = every_seconds
        """Time between two decisions that nothing has asked for."""
        self._decided_at = float("-inf")
        self._changed = False
        """Something has happened that a decision should be made on at once."""
        self._plans: dict[str, Plans] = {}
        self.grants: Mapping[str, Grant] = {}
        """Latest grants by trial."""
        self.snapshot: Snapshot | None = None
        """Snapshot of the last decision."""
        self.error: Exception | None = None
        """Why the policy's last answer could not be used; None when it could."""

    # ------------------------------------------------------------------ what it is told, by any thread

    def decide_anew(self) -> None:
        """Decide again at the next tick, even if the interval has not passed."""
        self._changed = True

    def note_plans(self, study: str, plans: Plans) -> None:
        """Note what a study's driver is going to submit."""
        self._plans[study] = plans

    def forget_study(self, study: str) -> None:
        self._plans.pop(study, None)

    # ------------------------------------------------------------------ asking

    def take_due(self, now: float) -> bool:
        """Tell whether to decide; asked before the trials are read, as later changes ask again."""
        changed, self._changed = self._changed, False
        return changed or now - self._decided_at >= self.every_seconds

    def decide(self, trials: Sequence[TrialRecord], now: float) -> None:
        """Ask the policy; when it fails or grants what does not exist, allocations stay as they are."""
        self._decided_at = now
        try:
            snapshot = self._observer.snapshot(
                trials,
                now,
                backing_off=self._backoff.trials(now),
                plans=self._plans,
                granted=self.grants,
            )
            self.snapshot = snapshot
            grants = self.policy.allocate(snapshot)
            check_grants(snapshot, grants)
        except StoreUnavailable:
            raise
        except Exception as error:
            self.error = error
            logger.exception("policy failed policy=%s; allocations stay as they are", self.policy.name)
            return
        self.error = None
        # While a change is carried out, it is for the reason that it was decided for.
        lasting = {name for name in self._observer.under_way if grants[name].reason.code == "unchanged"}
        self.grants = {**grants, **{name: self.grants[name] for name in lasting}}
