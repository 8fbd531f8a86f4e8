"""Replicas of a simulation, which act at once, or after as long as real ones take."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from dist_core.errors import EXIT_PREEMPTED
from dist_core.goodput import Hints
from scheduler.simulator.training import SimulatedTraining
from trials.launch import InMemoryLauncher
from trials.record import ReplicaRecord, ReplicaState, TrialRecord
from trials.store import TrialStore


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """Seconds; the defaults are those of a world in which everything is done by the next decision."""

    start: float = 0.0
    """Seconds from a replica's launch until it can train."""
    enter: float = 0.0
    """Seconds from then until all of its generation have found each other and train."""
    leave: float = 0.0
    """Seconds from a replica's last step until its slot is free."""
    successor: float = 0.0
    """Seconds from a trial's end until the next one of its sweep is submitted."""


LIVE = Timing(start=0.2, enter=0.2, leave=0.05, successor=0.05)
"""Seen on two cores, with warm fork servers."""
LIVE_PAUSE_SECONDS = 0.05


class SimulatedReplicas:
    def __init__(
        self,
        store: TrialStore,
        launcher: InMemoryLauncher,
        trainings: Mapping[str, SimulatedTraining],
        timing: Timing,
        *,
        waits_for_step: bool,
        on_news: Callable[[], None],
        on_refusal: Callable[[], None] = lambda: None,
    ) -> None:
        """``waits_for_step``: a new generation is entered between two steps. ``on_news``: the loop would be woken.

        ``on_refusal``: it would decide at once, because a job has said that it has no room.
        """
        self._store = store
        self._launcher = launcher
        self._trainings = trainings
        self._timing = timing
        self._waits_for_step = waits_for_step
        self._on_news = on_news
        self._on_refusal = on_refusal
        self._enters: dict[str, tuple[int, float]] = {}
        """Trial -> the published generation, and when it is entered."""
        self._leaves: dict[str, float] = {}

    def obey(self, now: float) -> None:
        """Do what the loop has asked for, as far as it is done by now."""
        for trial_id, training in self._trainings.items():
            trial = self._store.trial(trial_id)
            replicas = self._store.replicas(trial_id=trial_id)
            for replica in replicas:
                if replica.state is not ReplicaState.LAUNCHED or now < replica.launched_at + self._timing.start:
                    continue
                if trial.layout and not training.fits(trial.layout):
                    self._refuse(replica, training.refusal(trial.layout))
                else:
                    self._become_ready(replica, training.epoch if trial.members else None, now)
            if trial.switching and trial.entered < trial.published and now >= self._enters_at(trial, training, now):
                self._enter(trial, replicas, now)
        for replica_id in [replica_id for replica_id, at in self._leaves.items() if at <= now]:
            del self._leaves[replica_id]
            self._launcher.end(replica_id)
            self._store.writes += 1
            self._on_news()

    def _refuse(self, replica: ReplicaRecord, words: Hints) -> None:
        """Have a replica leave for another layout: its model has no room."""
        self._store.put_hints(replica.trial_id, words.to_json())
        self._launcher.end(replica.replica_id, EXIT_PREEMPTED)
        self._store.writes += 1
        self._on_refusal()
        self._on_news()

    def _become_ready(self, replica: ReplicaRecord, epoch: int | None, now: float) -> None:
        self._store.update_replica(
            replica.replica_id, state=ReplicaState.READY, join_epoch=epoch, contact_at=now, ready_at=now
        )
        self._on_news()

    def _enters_at(self, trial: TrialRecord, training: SimulatedTraining, now: float) -> float:
        entering = self._enters.get(trial.trial_id)
        if entering is None or entering[0] != trial.published:
            wait = training.seconds_to_next_step if self._waits_for_step else 0.0
            if set(trial.published_members) - set(trial.members):
                wait = max(wait, self._timing.enter)
            entering = self._enters[trial.trial_id] = trial.published, now + wait
        return entering[1]

    def _enter(self, trial: TrialRecord, replicas: list[ReplicaRecord], now: float) -> None:
        if trial.published_members:
            self._store.note_entered(trial.trial_id, trial.published)
            self._on_news()
        for replica in replicas:
            left = replica.replica_id in trial.members and replica.replica_id not in trial.published_members
            if left and replica.replica_id in self._launcher.running:
                self.leave(replica.replica_id, now)

    def leave(self, replica_id: str, now: float) -> None:
        """Let a replica leave: it has made its last step."""
        if not self._timing.leave:
            self._launcher.end(replica_id)
            self._store.writes += 1
        else:
            self._leaves.setdefault(replica_id, now + self._timing.leave)

    def next_event(self, now: float) -> float:
        """Return when the next of them is done with something if nothing else happens.

        Infinite if none has anything.
        """
        times = list(self._leaves.values())
        for trial_id, training in self._trainings.items():
            trial = self._store.trial(trial_id)
            times += [
                replica.launched_at + self._timing.start
                for replica in self._store.replicas(trial_id=trial_id)
                if replica.state is ReplicaState.LAUNCHED
            ]
            if trial.switching and trial.entered < trial.published:
                times.append(self._enters_at(trial, training, now))
        return min((at for at in times if at > now), default=math.inf)
