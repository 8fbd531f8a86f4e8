"""Executor: does what the plan of a trial says; each action is safe to repeat."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace

from dist_core.errors import EXIT_PREEMPTED
from scheduler.knowledge.observer import Observer
from scheduler.loop.backoff import Backoff
from scheduler.loop.journal import Journal
from scheduler.loop.observations import Observations
from scheduler.loop.settings import LoopSettings
from scheduler.loop.starts import Starts
from scheduler.loop.trial_files import TrialFiles
from scheduler.snapshot import Grant, Placement
from trials.launch.base import Launcher
from trials.plan import (
    DONE_PATIENCE_SECONDS,
    Circumstances,
    Launch,
    Publish,
    RetryJoin,
    Stop,
    plan,
    replica_number,
    whole_replicas,
)
from trials.record import Reason, ReplicaRecord, TrialRecord
from trials.states import TrialEvent, TrialState
from trials.store import TrialStore

logger = logging.getLogger(__name__)


class Executor:
    def __init__(
        self,
        store: TrialStore,
        launcher: Launcher,
        journal: Journal,
        backoff: Backoff,
        files: TrialFiles,
        starts: Starts,
        observations: Observations,
        observer: Observer,
        settings: LoopSettings,
    ) -> None:
        self._store = store
        self._launcher = launcher
        self._journal = journal
        self._backoff = backoff
        self._files = files
        self._starts = starts
        self._observations = observations
        self._observer = observer
        self._settings = settings
        self._moving: set[str] = set()
        """Trials of which some replicas leave when others have joined elsewhere; told as one change."""
        self._blocked_since: dict[str, float] = {}
        self._torn = TornReplicas()

    def act_on(self, trial: TrialRecord, grant: Grant, now: float) -> None:
        self._journal.note_waiting(trial, grant, now)
        replicas = self._store.replicas(trial_id=trial.trial_id)
        trial, wanted = self._as_granted(trial, grant, replicas)
        blocked = self._blocked_since.pop(trial.trial_id, None)
        circumstances = Circumstances(
            near_epoch=self._observer.near_epoch(trial.trial_id),
            vacate=blocked is not None and now - blocked >= self._settings.move_patience_seconds,
            leaving=frozenset(self._observations.leaving),
            broken_since=self._observations.broken_since(trial.trial_id),
            done=self._done(trial, replicas, now),
            torn_for_good=self._torn_for_good(trial, replicas, now),
        )
        for action in plan(trial, wanted, replicas, now, circumstances):
            if isinstance(action, Launch):
                if not self._launch(trial, grant, action.placement, now) and trial.members:
                    self._blocked_since[trial.trial_id] = now if blocked is None else blocked
            elif isinstance(action, Publish):
                self._publish(trial, grant, action, now)
            elif isinstance(action, Stop):
                self._stop(action, replicas, now)
            elif isinstance(action, RetryJoin):
                for joiner in replicas:
                    if joiner.replica_id in action.replica_ids:
                        self._store.retry_join(joiner.replica_id, joiner.join_epoch)

    def _as_granted(
        self, trial: TrialRecord, grant: Grant, replicas: Sequence[ReplicaRecord]
    ) -> tuple[TrialRecord, Placement]:
        """Return the trial with the layout that it is to have, and the slots that it should have now.

        None, as long as it has replicas of another layout: it goes on from its checkpoint when they have left.
        """
        layout = self._observer.present_layout(trial)
        if grant.layout and grant.layout != layout and grant.slots:
            if replicas:
                return trial, {}
            layout = grant.layout
        if layout != trial.layout:
            trial = replace(self._store.trial(trial.trial_id), layout=layout)
            self._store.save_trial(trial)
        return trial, grant.placement

    def _done(self, trial: TrialRecord, replicas: Sequence[ReplicaRecord], now: float) -> frozenset[str]:
        """Members that have lately ended without an error, which nobody asked of them."""
        gone = set(trial.members) - {replica.replica_id for replica in replicas} - self._observations.leaving
        if not gone:
            return frozenset()
        return frozenset(
            row.replica_id
            for row in self._store.replicas(trial_id=trial.trial_id, live_only=False)
            if row.replica_id in gone
            and row.exit_status == 0
            and row.stop_requested_at is None
            and now - (row.gone_at or 0.0) < DONE_PATIENCE_SECONDS
        )

    def _torn_for_good(self, trial: TrialRecord, replicas: Sequence[ReplicaRecord], now: float) -> frozenset[str]:
        if trial.slots_per_replica == 1:
            return frozenset()
        return self._torn.look(trial, replicas, self._store.replicas(trial_id=trial.trial_id, live_only=False), now)

    def forget(self, trial_id: str) -> None:
        self._moving.discard(trial_id)
        self._blocked_since.pop(trial_id, None)
        self._torn.forget(trial_id)

    # ------------------------------------------------------------------ launching

    def _launch(self, trial: TrialRecord, grant: Grant, wanted: Mapping[str, int], now: float) -> int:
        """Start replicas where slots are free; returns how many could be started."""
        if self._backoff.holds(trial.trial_id, now):
            # The decision that is being carried out is older than what happened to the trial.
            return 0
        started = self._start_on_free_slots(trial, grant, wanted, now)
        if not started:
            return 0
        trial = self._store.trial(trial.trial_id)
        if trial.state in (TrialState.PENDING, TrialState.PAUSED):
            self._journal.move(trial, TrialEvent.LAUNCHED, grant.reason, now, numbers=grant.numbers)
            return started
        after = len(self._store.replicas(trial_id=trial.trial_id))
        if trial.members and after > grant.slots:
            # It moves: some of those that train now leave when these have joined.
            self._moving.add(trial.trial_id)
        if trial.state is TrialState.RUNNING:
            before, after = len(trial.members), min(after, grant.slots)
            self._journal.note_rescale(trial, grant.reason, before, after, now, numbers=grant.numbers)
        return started

    def _start_on_free_slots(self, trial: TrialRecord, grant: Grant, wanted: Mapping[str, int], now: float) -> int:
        places_of = self._starts.free_places()
        free = [places_of.get(name, [])[:count] for name, count in wanted.items()]
        size = trial.slots_per_replica
        if size > self._starts.most_on_a_node:
            free = [[place for places in free for place in places]]
        started, index = 0, self._next_launch_index(trial)
        for places in free:
            for first in range(0, len(places) // size * size, size):
                began = self._starts.start(trial, places[first : first + size], index, grant.slots, now)
                # Numbers are a replica's own, also of one of which not all could be started.
                index += size if began else 0
                started += began
        return started

    def _next_launch_index(self, trial: TrialRecord) -> int:
        """0 for the first of a new set: until ranks are given out, that one speaks for the trial.

        A replica's processes have consecutive ones, of which the first is a multiple of their number.
        """
        indices = [replica.launch_index for replica in self._store.replicas(trial_id=trial.trial_id)]
        size = trial.slots_per_replica
        return -(-(max(indices, default=-1) + 1) // size) * size

    # ------------------------------------------------------------------ publishing

    def _publish(self, trial: TrialRecord, grant: Grant, action: Publish, now: float) -> None:
        trial = self._store.trial(trial.trial_id)
        self._observations.note_whole(trial.trial_id)
        number = max(trial.generation, trial.published) + 1
        self._store.save_trial(
            replace(
                trial,
                published=number,
                published_members=action.members,
                published_at=now,
                join_epoch=action.join_epoch,
            )
        )
        if trial.members and len(action.members) < len(trial.members):
            self._note_shrinking(trial, grant, len(action.members), now)
        logger.info(
            "generation published trial=%s generation=%d members=%d", trial.trial_id, number, len(action.members)
        )

    def _note_shrinking(self, trial: TrialRecord, grant: Grant, after: int, now: float) -> None:
        """Note why a trial shrinks: it was decided so, or some of its replicas are lost or told to leave."""
        before, size = len(trial.members), trial.slots_per_replica
        live = {replica.replica_id for replica in self._store.replicas(trial_id=trial.trial_id)}
        lost = before - len(live.intersection(trial.members))
        leaving = len(self._observations.leaving & set(trial.members))
        reason = grant.reason
        if lost:
            reason = Reason(
                code="replica_lost",
                sentence=f"lost {-(-lost // size)} of {before // size} replicas; the others go on",
            )
        elif leaving:
            sentence = f"{-(-leaving // size)} of {before // size} replicas must leave their nodes; the others go on"
            reason = Reason(code="replica_preempted", sentence=sentence)
        if lost or leaving or trial.trial_id not in self._moving:
            numbers = grant.numbers if reason is grant.reason else {}
            present = self._store.trial(trial.trial_id)
            self._journal.note_rescale(present, reason, before, after, now, numbers=numbers)
        self._moving.discard(trial.trial_id)

    # ------------------------------------------------------------------ stopping

    def _stop(self, action: Stop, replicas: Sequence[ReplicaRecord], now: float) -> None:
        for replica in replicas:
            if replica.replica_id == action.replica_id:
                self._store.update_replica(replica.replica_id, stop_requested_at=now)
                if action.force:
                    self._files.collect_log(replica)
                self._launcher.stop(replica, force=action.force)

    def stop_leftovers(self, now: float) -> None:
        """Stop replicas of trials that are over; they get a moment to end by themselves."""
        replicas = self._store.replicas()
        if not replicas:
            return
        live = {trial.trial_id for trial in self._store.trials(live_only=True)}
        for trial_id in {replica.trial_id for replica in replicas} - live:
            trial = self._store.trial(trial_id)
            own_replicas = [replica for replica in replicas if replica.trial_id == trial_id]
            if trial.outcome is not None and now - (trial.finished_at or now) < self._settings.leaving_seconds:
                continue
            for action in plan(trial, {}, own_replicas, now):
                if isinstance(action, Stop):
                    self._stop(action, own_replicas, now)


PATIENCE_SECONDS = 5.0
"""Seconds for the rest of a broken replica's processes to notice, and end by themselves."""


class TornReplicas:
    def __init__(self) -> None:
        self._incomplete_since: dict[str, dict[str, float]] = {}

    def look(
        self, trial: TrialRecord, rows: Sequence[ReplicaRecord], all_rows: Sequence[ReplicaRecord], now: float
    ) -> frozenset[str]:
        """Return processes of the trial's ``rows`` that others of their replica have been lost beside for too long.

        ``all_rows``: those that are gone among them. Of one that has come to its end, or leaves with a checkpoint, the
        others may still do what is theirs.
        """
        before = self._incomplete_since.get(trial.trial_id, {})
        size = trial.slots_per_replica

        def replica_of(row: ReplicaRecord) -> tuple[float, int]:
            # A number is used again, but not by what is launched at the same moment.
            return row.launched_at, replica_number(row, size)

        _, torn = whole_replicas(rows, size)
        left = {replica_of(row) for row in all_rows if row.exit_status in (0, EXIT_PREEMPTED)}
        since = {row.replica_id: before.get(row.replica_id, now) for row in torn if replica_of(row) not in left}
        self._incomplete_since[trial.trial_id] = since
        return frozenset(name for name, at in since.items() if now - at > PATIENCE_SECONDS)

    def forget(self, trial_id: str) -> None:
        self._incomplete_since.pop(trial_id, None)
