"""Housekeeping of a cluster's scheduler beside its trials: what people see, what is over, room for more nodes.

Called after each look of the control loop, from its thread; every step is safe to repeat and to leave out.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from scheduler.kubernetes.placeholders import Placeholders
from scheduler.loop.control_loop import ControlLoop
from scheduler.snapshot import TrialView
from trials.errors import ClusterRefused, StoreUnavailable
from trials.kubernetes.resources.store import KubernetesTrialStore
from trials.kubernetes.settings import ClusterSettings
from trials.record import Report, TrialRecord

SHOW_SECONDS = 5.0
"""At most so often are goodput, progress and promise written for people to see."""
SWEEP_SECONDS = 60.0

logger = logging.getLogger(__name__)


class Housekeeping:
    def __init__(
        self,
        store: KubernetesTrialStore,
        loop: ControlLoop,
        settings: ClusterSettings,
        placeholders: Placeholders,
        *,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._store = store
        self._loop = loop
        self._settings = settings
        self._placeholders = placeholders
        self._clock = clock
        self._shown: dict[str, dict[str, Any]] = {}
        self._shown_studies: dict[str, dict[str, Any]] = {}
        self._swept_at = float("-inf")
        self._shown_at = float("-inf")

    def look(self) -> None:
        now = self._clock()
        try:
            self._let_go()
            if now - self._shown_at >= SHOW_SECONDS:
                self._shown_at = now
                self._show()
            self._placeholders.adjust(self._loop.decisions.snapshot, now)
            if now - self._swept_at > SWEEP_SECONDS:
                self._swept_at = now
                self._sweep(now)
        except (StoreUnavailable, ClusterRefused) as error:
            logger.warning("could not clean up ended trials, trying again: %s", error)

    def _let_go(self) -> None:
        """Let go of trials that are over, have no replicas, and whose checkpoints the loop has removed."""
        for record in self._store.following.bound():
            if self._store.replicas(trial_id=record.trial_id):
                continue
            try:
                self._store.following.let_go(record.trial_id)
            except (StoreUnavailable, ClusterRefused) as error:
                logger.warning("trial not released yet trial=%s error=%s", record.trial_id, error)

    def _sweep(self, now: float) -> None:
        for record in self._store.trials():
            ended = record.finished_at
            if ended is not None and now - ended > self._settings.keep_ended_seconds:
                self._store.remove(record.trial_id)
                self._loop.files.forget_logs(record.trial_id)
        self._store.following.forget_gone()

    def _show(self) -> None:
        views = self._loop.observer.latest_views
        latest: dict[str, Report] = {}
        best: dict[str, float] = {}
        for study in self._store.studies():
            for report in self._store.reports(study.name):
                latest[report.trial_id] = report
                if report.value is not None:
                    better = max if study.direction == "maximize" else min
                    best[study.name] = better(best.get(study.name, report.value), report.value)
        trials = self._store.trials()
        slots = Counter(replica.trial_id for replica in self._store.replicas())
        of_study: dict[str, list[TrialRecord]] = {}
        for record in trials:
            of_study.setdefault(record.spec.study, []).append(record)
            if not record.state.is_final:
                shown = shown_of(record, views.get(record.trial_id), latest.get(record.trial_id))
                self._show_one(self._shown, record.trial_id, shown, self._store.show)
        for study in self._store.studies():
            trials_of_study = of_study.get(study.name, [])
            shown = {
                "trials": len(trials_of_study),
                "running": sum(record.state.holds_slots for record in trials_of_study),
                "slots": sum(slots[record.trial_id] for record in trials_of_study),
                "best": f"{best[study.name]:.6g}" if study.name in best else None,
            }
            self._show_one(self._shown_studies, study.name, shown, self._store.show_study)

    @staticmethod
    def _show_one(
        written: dict[str, dict[str, Any]],
        name: str,
        shown: dict[str, Any],
        write: Callable[[str, Mapping[str, Any]], None],
    ) -> None:
        if shown != written.get(name):
            write(name, shown)
            written[name] = shown


def shown_of(record: TrialRecord, view: TrialView | None, latest: Report | None) -> dict[str, Any]:
    """Return the columns of `kubectl get trials` that change while a trial runs."""
    if view is None:
        return {}
    total = None if view.remaining_progress is None else view.progress + view.remaining_progress
    progress = f"{100.0 * view.progress / total:.0f}%" if total else f"{view.progress:.3g}"
    goodput = None
    if view.model is not None and view.placement and record.members:
        largest = max(view.placement.values())
        goodput = f"{_goodput(view, len(record.members), largest):.3g}/s"
    return {
        "progress": progress,
        "promise": f"{view.promise:.2f}",
        "goodput": goodput,
        "latestValue": None if latest is None or latest.value is None else f"{latest.value:.6g}",
    }


def _goodput(view: TrialView, replicas: int, node_slots: int) -> float:
    import numpy as np

    assert view.model is not None
    return float(view.model.curve(node_slots, np.array([replicas]))[0])
