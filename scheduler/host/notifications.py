"""Tells a webhook what people want to know without looking: a trial failed, a study is done, a budget is nearly used.

What is news is worked out from what was seen before; sending is another thread's, which tries for a while and then
lets it be. What happened before the scheduler began is no news.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx2

from scheduler.knowledge.accounts import slot_seconds_by_trial
from trials.errors import StoreUnavailable
from trials.record import Study, TrialRecord
from trials.states import TrialState
from trials.store import TrialStore

logger = logging.getLogger(__name__)

LOOK_SECONDS = 2.0
BUDGET_SHARE = 0.8
TRIES = 4
FIRST_PAUSE_SECONDS = 1.0
MOST_WAITING = 1000
"""Notices; the address is away for long where more wait, and the oldest are of the least use."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Notice:
    event: str
    """``trial_failed``, ``study_done`` or ``budget``."""
    text: str
    """Text for people."""
    about: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        return {"event": self.event, "text": self.text, **self.about}


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """Notices that were sent, or were due before this process began."""

    failed: frozenset[str] = frozenset()
    done: Mapping[str, int] = field(default_factory=dict)
    """Number of trials that each study had when it was done."""
    budgets: Mapping[str, float] = field(default_factory=dict)
    """Budget that each study has used so far."""


def news(
    seen: Seen, trials: Sequence[TrialRecord], studies: Sequence[Study], used_hours: Mapping[str, float]
) -> tuple[list[Notice], Seen]:
    """Return what there is to tell, and what was told then. Pure. ``used_hours``: by study, of those with a budget."""
    notices: list[Notice] = []
    failed = {trial.trial_id for trial in trials if trial.state is TrialState.FAILED}
    called = {study.name: study.called for study in studies}
    for trial in trials:
        if trial.trial_id in failed - seen.failed:
            name = f"{called.get(trial.spec.study, trial.spec.study)}/{trial.spec.number}"
            text = f"trial {name} failed: {trial.reason.sentence}"
            about = {"trial": trial.trial_id, "study": trial.spec.study}
            notices.append(Notice(event="trial_failed", text=text, about=about))
    of_study: dict[str, list[TrialRecord]] = {}
    for trial in trials:
        of_study.setdefault(trial.spec.study, []).append(trial)
    done: dict[str, int] = {}
    budgets: dict[str, float] = {}
    for study in studies:
        trials_of_study = of_study.get(study.name, [])
        if study.owner is None and trials_of_study and all(trial.state.is_final for trial in trials_of_study):
            done[study.name] = len(trials_of_study)
            if seen.done.get(study.name) != len(trials_of_study):
                best = _best(trials_of_study, study.direction)
                words = "" if best is None else f", the best {best:.6g}"
                text = f"study {study.called} is done: {len(trials_of_study)} trials{words}"
                notices.append(
                    Notice(event="study_done", text=text, about={"study": study.name, "trials": len(trials_of_study)})
                )
        budget = study.terms.budget_slot_hours
        used = used_hours.get(study.name, 0.0)
        if budget and used >= BUDGET_SHARE * budget:
            budgets[study.name] = budget
            if seen.budgets.get(study.name) != budget:
                text = f"study {study.called} has used {used:.3g} of its {budget:.3g} slot hours"
                amounts = {"study": study.name, "used": used, "budget": budget}
                notices.append(Notice(event="budget", text=text, about=amounts))
    return notices, Seen(failed=frozenset(failed), done=done, budgets=budgets)


def _best(trials: Sequence[TrialRecord], direction: str) -> float | None:
    values = [
        float(trial.outcome.value)
        for trial in trials
        if trial.outcome is not None and isinstance(trial.outcome.value, int | float)
    ]
    return None if not values else max(values) if direction == "maximize" else min(values)


class Notifier:
    """Sends a study's notices to a webhook.

    ``look`` is called by the loop's thread, and costs next to nothing most of the time.
    """

    def __init__(
        self,
        url: str,
        store: TrialStore,
        *,
        clock: Callable[[], float] = time.time,
        post: Callable[[str, Mapping[str, Any]], None] | None = None,
    ) -> None:
        self._url = url
        self._store = store
        self._clock = clock
        self._post = post or _post
        self._seen: Seen | None = None
        self._looked_at = float("-inf")
        self._waiting: queue.Queue[Notice] = queue.Queue(MOST_WAITING)
        threading.Thread(target=self._send_all, name="elastune-webhook", daemon=True).start()

    def look(self) -> None:
        now = self._clock()
        if now - self._looked_at < LOOK_SECONDS:
            return
        self._looked_at = now
        try:
            notices, seen = news(self._seen or Seen(), self._store.trials(), self._store.studies(), self._used(now))
        except StoreUnavailable:
            return
        is_first, self._seen = self._seen is None, seen
        for notice in () if is_first else notices:
            try:
                self._waiting.put_nowait(notice)
            except queue.Full:
                logger.warning("notice dropped, too many are waiting: %s", notice.text)

    def _used(self, now: float) -> dict[str, float]:
        limited = {study.name for study in self._store.studies() if study.terms.budget_slot_hours}
        if not limited:
            return {}
        study_of = {trial.trial_id: trial.spec.study for trial in self._store.trials() if trial.spec.study in limited}
        hours: dict[str, float] = {}
        for trial_id, seconds in slot_seconds_by_trial(self._store.slot_intervals(), now).items():
            if trial_id in study_of:
                hours[study_of[trial_id]] = hours.get(study_of[trial_id], 0.0) + seconds / 3600.0
        return hours

    def _send_all(self) -> None:
        while True:
            notice = self._waiting.get()
            pause = FIRST_PAUSE_SECONDS
            for attempt in range(TRIES):
                try:
                    self._post(self._url, notice.to_json())
                    break
                except httpx2.HTTPError as error:
                    if attempt == TRIES - 1:
                        logger.warning("the webhook did not accept a notice: %s: %s", notice.text, error)
                    time.sleep(pause)
                    pause *= 3.0


def _post(url: str, document: Mapping[str, Any]) -> None:
    httpx2.post(url, json=dict(document), timeout=10.0).raise_for_status()
