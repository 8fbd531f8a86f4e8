"""Builds the policy's snapshot from the store and the launcher, and keeps what is costly to rebuild each time.

Kept between ticks: each trial's fitted goodput model, until its measurements change, and how long replicas of each
study take to start. Both can be rebuilt from the store, so a new scheduler starts without them. One thread calls it.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass

from dist_core.goodput import GoodputModel, Hints, Observation
from scheduler.pooling import pool_observations
from scheduler.promise import Promise, promises
from scheduler.snapshot import NodeView, Snapshot, TrialView
from trials.launch.base import Launcher
from trials.record import ReplicaRecord, Report, Study, TrialRecord
from trials.states import TrialState
from trials.store import TrialStore

DEFAULT_PAUSE_SECONDS = 0.3
"""Assumed cost of a rescale until a trial has measured its own."""
DEFAULT_START_SECONDS = 2.0
"""Assumed time from a replica's launch to its first training step until the study has shown its own."""
OFFER_SECONDS = 15.0
"""A generation is offered at most so long before the trial comes to the epoch in which its joiners wait."""
REFIT_SECONDS = 2.0
"""Least time between fits caused by other trials' measurements alone."""


@dataclass(frozen=True, slots=True)
class _Fitted:
    hints: tuple[Observation, ...]
    fitted_at: float
    model: GoodputModel | None


class Observer:
    def __init__(self, store: TrialStore, launcher: Launcher) -> None:
        self._store = store
        self._launcher = launcher
        self._hints: dict[str, Hints] = {}
        self._models: dict[str, _Fitted] = {}
        self._start_seconds: dict[str, deque[float]] = {}
        self._started_seen: set[str] = set()
        self.latest_views: Mapping[str, TrialView] = {}

    def forget(self, trial_id: str) -> None:
        """The trial is over."""
        self._models.pop(trial_id, None)

    def near_epoch(self, trial_id: str) -> int | None:
        """Latest epoch that the trial reaches soon; None while nothing is known of it."""
        hints = self._hints.get(trial_id)
        if hints is None:
            return None
        if not hints.epoch_seconds:
            return hints.epoch
        return hints.epoch + int(OFFER_SECONDS / hints.epoch_seconds)

    def snapshot(
        self, trials: Sequence[TrialRecord], now: float, *, backing_off: Set[str], since_last_end: float
    ) -> Snapshot:
        """What the policy may know of these trials (all that are live).

        ``backing_off``: those that must not be given further replicas yet, because launches failed or losses repeat.
        """
        replicas = self._store.replicas()
        nodes = tuple(NodeView(name=node.node, slots=node.slots) for node in self._launcher.nodes())
        self._note_starts(trials, replicas)
        studies = {study.name: study for study in self._store.studies()}
        hints = self._parsed_hints([trial.trial_id for trial in trials])
        self._hints = hints
        standing = self._promises(trials, studies)
        studies_of = {trial.trial_id: trial.spec.study for trial in trials}
        views = tuple(
            self._view(
                trial,
                [replica for replica in replicas if replica.trial_id == trial.trial_id],
                studies.get(trial.spec.study),
                self._pooled(trial, studies_of),
                standing.get(trial.trial_id),
                now,
                backs_off=trial.trial_id in backing_off,
            )
            for trial in trials
        )
        self.latest_views = {view.trial_id: view for view in views}
        return Snapshot(now=now, nodes=nodes, trials=views, free_for_seconds=since_last_end)

    def _note_starts(self, trials: Sequence[TrialRecord], replicas: Sequence[ReplicaRecord]) -> None:
        """How long replicas of each study take from launch to their first training step."""
        studies_of = {trial.trial_id: trial.spec.study for trial in trials}
        for replica in replicas:
            if replica.ready_at is None or replica.replica_id in self._started_seen:
                continue
            self._started_seen.add(replica.replica_id)
            study = studies_of.get(replica.trial_id)
            if study is not None:
                known = self._start_seconds.setdefault(study, deque(maxlen=15))
                known.append(max(0.0, replica.ready_at - replica.launched_at))

    def _view(
        self,
        trial: TrialRecord,
        replicas: Sequence[ReplicaRecord],
        study: Study | None,
        pooled: Sequence[Observation],
        promise: Promise | None,
        now: float,
        *,
        backs_off: bool,
    ) -> TrialView:
        placement: dict[str, int] = {}
        for replica in replicas:
            placement[replica.node] = placement.get(replica.node, 0) + 1
        known = self._hints.get(trial.trial_id)
        remaining = None
        if known is not None and known.target_progress is not None and known.goodput > 0:
            remaining = max(0.0, known.target_progress - known.progress) / known.goodput
        held = trial.hold
        if held is None and backs_off and not replicas:
            held = "waits a moment before it is started again, because it was lost or could not be launched"
        pause = known.rescale_pause_seconds if known is not None else None
        return TrialView(
            trial_id=trial.trial_id,
            study=trial.spec.study,
            min_replicas=trial.spec.min_replicas,
            max_replicas=trial.spec.max_replicas,
            placement=placement,
            can_rescale=trial.state is TrialState.RUNNING
            and trial.generation > 0
            and not trial.switching
            and not backs_off,
            held=held,
            model=self._model(trial.trial_id, known, pooled, now),
            most_profiled=max(
                (row.configuration.num_replicas for row in (*(known.observations if known else ()), *pooled)), default=1
            ),
            promise=promise.weight if promise is not None else 0.5,
            rank_sentence=promise.sentence if promise is not None else "nothing reported yet",
            remaining_seconds=remaining,
            pause_seconds=DEFAULT_PAUSE_SECONDS if pause is None else pause,
            start_seconds=statistics.median(self._start_seconds.get(trial.spec.study, (DEFAULT_START_SECONDS,))),
            since_rescale_seconds=now - trial.rescaled_at,
            study_weight=study.weight if study is not None else 1.0,
        )

    def _parsed_hints(self, trial_ids: Sequence[str]) -> dict[str, Hints]:
        return {trial_id: Hints.from_json(document) for trial_id, document in self._store.hints(trial_ids).items()}

    def _pooled(self, trial: TrialRecord, studies_of: Mapping[str, str]) -> list[Observation]:
        """What the trial's study has measured in configurations that the trial itself has not run."""
        own = self._hints.get(trial.trial_id)
        if own is None:
            return []
        others = [
            known.observations
            for trial_id, known in self._hints.items()
            if trial_id != trial.trial_id and studies_of[trial_id] == trial.spec.study
        ]
        return pool_observations(own.observations, others)

    def _model(
        self, trial_id: str, hints: Hints | None, pooled: Sequence[Observation], now: float
    ) -> GoodputModel | None:
        """The trial's model; fitted again when its own measurements changed, or others' a while ago."""
        if hints is None or not hints.observations:
            return None
        cached = self._models.get(trial_id)
        if cached is not None and cached.hints == hints.observations and now - cached.fitted_at < REFIT_SECONDS:
            return cached.model
        model = hints.fit(extra_observations=pooled)
        self._models[trial_id] = _Fitted(hints.observations, now, model)
        return model

    def _promises(self, trials: Sequence[TrialRecord], studies: Mapping[str, Study]) -> dict[str, Promise]:
        result: dict[str, Promise] = {}
        for name in {trial.spec.study for trial in trials}:
            by_trial: dict[str, list[Report]] = {trial.trial_id: [] for trial in trials if trial.spec.study == name}
            for report in self._store.reports(name):
                by_trial.setdefault(report.trial_id, []).append(report)
            study = studies.get(name)
            result.update(promises(by_trial, maximize=study is not None and study.direction == "maximize"))
        return result
