"""Observations: turns exits and leases into facts of the store."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Set

from dist_core.errors import EXIT_PREEMPTED
from scheduler.loop.backoff import FAILED_JOIN_SECONDS, Backoff
from scheduler.loop.journal import Journal
from scheduler.loop.liveness import ENDED_CODE, Liveness
from scheduler.loop.starts import Starts
from scheduler.loop.trial_files import TrialFiles
from trials.launch.base import Exit, Launcher
from trials.record import ReplicaRecord, ReplicaState, Study
from trials.store import TrialStore

OWNER_LEASE_SECONDS = 20.0
"""A study whose driver has not asked for news for so long is paused: nobody would take its results."""

logger = logging.getLogger(__name__)


def is_driven(study: Study, now: float) -> bool:
    """Tell whether the study has a driver that has called of late."""
    return study.owner is not None and now - (study.owner_seen_at or 0.0) < OWNER_LEASE_SECONDS


class Observations:
    """Writes exits, lost leases and silence of replicas into the store.

    ``on_loss``: told when a replica is gone.
    """

    def __init__(
        self,
        store: TrialStore,
        launcher: Launcher,
        journal: Journal,
        backoff: Backoff,
        files: TrialFiles,
        starts: Starts,
        liveness: Liveness,
        *,
        deaf_until: float,
        on_loss: Callable[[], None],
    ) -> None:
        self._store = store
        self._launcher = launcher
        self._journal = journal
        self._backoff = backoff
        self._files = files
        self._starts = starts
        self._liveness = liveness
        self._deaf_until = deaf_until
        """Last time that this scheduler could not hear of owners."""
        self._on_loss = on_loss
        self._why_gone: dict[str, Exit] = {}
        """Ends of replicas as the launcher knew them, until their trial has been judged."""
        self._leaving: set[str] = set()
        """Replicas that somebody outside wants gone; a new scheduler hears of them when they have left."""
        self._broken: dict[str, float] = {}
        """Since when a trial's replicas wait for one another: a collective of theirs has failed."""

    # ------------------------------------------------------------------ what is said from outside

    def note_leaving(self, replica_id: str) -> None:
        """Note that whoever runs its machine has told the replica to end; from API handlers."""
        self._leaving.add(replica_id)

    def note_broken(self, trial_id: str, now: float) -> None:
        """Note that one of the trial's replicas waits to go on with those that are left; from API handlers."""
        self._broken.setdefault(trial_id, now)

    def note_whole(self, trial_id: str) -> None:
        """Note that the trial's replicas train together, in the generation on offer or in one that was."""
        self._broken.pop(trial_id, None)

    def broken_since(self, trial_id: str) -> float | None:
        return self._broken.get(trial_id)

    @property
    def leaving(self) -> Set[str]:
        return frozenset(self._leaving)

    def note_deafness(self, now: float) -> None:
        """Note that until now nobody could be heard, and nothing be written."""
        self._deaf_until = now
        self._liveness.was_deaf()

    # ------------------------------------------------------------------ what is found at a look

    def look(self, now: float) -> None:
        if not self._liveness.look():
            self._deaf_until = now
        self._files.shorten_logs()
        self._files.forget_prepared()
        self._liveness.end_silent(self._store.replicas(), now)
        self._starts.note_started(now)
        self._note_exits(now)
        self._follow_owners(now)

    def _note_exits(self, now: float) -> None:
        replicas = self._store.replicas()
        by_id = {replica.replica_id: replica for replica in replicas}
        for replica in replicas:
            if replica.pid is None and not self._starts.is_under_way(replica.replica_id):
                # A scheduler died between writing the row and starting the process. Should the process exist after
                # all, the API refuses it and it leaves.
                self._store.update_replica(replica.replica_id, state=ReplicaState.GONE, gone_at=now)
        for gone in self._launcher.exits(replicas):
            replica = by_id[gone.replica_id]
            if gone.code != "node_lost":
                self._files.collect_log(replica)
            self._store.update_replica(gone.replica_id, state=ReplicaState.GONE, gone_at=now, exit_status=gone.status)
            self._on_loss()
            if replica.stop_requested_at is None:
                self._note_unasked(replica, self._liveness.explain(gone), now)
            self._leaving.discard(gone.replica_id)
            logger.info("replica gone trial=%s replica=%s status=%s", replica.trial_id, gone.replica_id, gone.status)

    def _note_unasked(self, replica: ReplicaRecord, gone: Exit, now: float) -> None:
        """Note the end of a replica that was not asked to end."""
        if gone.why:
            self._why_gone[gone.replica_id] = gone
            if gone.code != ENDED_CODE:
                sentence = f"replica {gone.replica_id} was ended: {gone.why}"
                self._journal.warn(replica.trial_id, gone.code, sentence, now)
        trial = self._store.trial(replica.trial_id)
        may_have_joined = replica.join_epoch is not None or replica.launch_index > 0
        joined = replica.state is ReplicaState.ACTIVE
        # One that leaves before it has joined has no room; the scheduler hears that from those that train.
        # Others that leave unasked were told to from outside, or had no scheduler to hear.
        left = trial.layout != "" and gone.status == EXIT_PREEMPTED and gone.replica_id not in self._leaving
        failed = (gone.status in (1, None) or left) and replica.replica_id not in trial.members and not joined
        if may_have_joined and failed and trial.members:
            # A joiner that ended by itself would end so again: the next one is not started at once.
            self._backoff.begin(trial.trial_id, now, FAILED_JOIN_SECONDS)
            sentence = f"replica {replica.replica_id} ended before it could join; see its log"
            self._journal.warn(trial.trial_id, "join_failed", sentence, now)
        if gone.status == 0 and not joined and trial.members:
            # It came when the trial was about over, and so would the next one.
            self._backoff.begin(trial.trial_id, now, FAILED_JOIN_SECONDS)

    def _follow_owners(self, now: float) -> None:
        """Pause the studies whose driver is gone. A driver that is back releases the trials it asks for."""
        for study in self._store.studies():
            if study.owner_seen_at is None:
                continue
            # While this scheduler was down or its disk full, no driver could renew its lease.
            seen = max(study.owner_seen_at, self._deaf_until)
            if study.owner is not None and now - seen <= OWNER_LEASE_SECONDS:
                continue
            left = [
                trial.trial_id
                for trial in self._store.trials(live_only=True)
                if trial.spec.study == study.name and trial.spec.driven and trial.hold is None
            ]
            if left:
                self._store.hold(left, "its driver is gone; start the same sweep again with resume=True to continue")
                logger.info("study held study=%s trials=%d", study.name, len(left))

    # ------------------------------------------------------------------ what is known of ends

    def take_ends(self, replicas: Iterable[ReplicaRecord]) -> dict[str, Exit | None]:
        """Take what the launcher said of each replica's end, to judge its trial once."""
        return {replica.replica_id: self._why_gone.pop(replica.replica_id, None) for replica in replicas}

    def forget(self, trial_id: str) -> None:
        self._broken.pop(trial_id, None)
        for replica_id in [name for name in self._why_gone if name.startswith(trial_id)]:
            del self._why_gone[replica_id]
