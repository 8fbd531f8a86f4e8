"""What simulated replicas do when they are told something: at once, or after as long as real ones take."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from dist_core.exit_statuses import EXIT_PREEMPTED
from dist_core.goodput import Hints
from dist_core.link.reshape import Reshape
from scheduler.simulator.training import SimulatedTraining
from trials.launch import InMemoryLauncher
from trials.record import ReplicaRecord, ReplicaState, TrialRecord
from trials.store import InMemoryTrialStore


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """Seconds; the defaults are those of a world in which everything is done by the next decision."""

    start: float = 0.0
    """From a replica's launch until it can train."""
    enter: float = 0.0
    """From then until all of its generation have found each other and train."""
    leave: float = 0.0
    """From a replica's last step until its slot is free."""
    successor: float = 0.0
    """From a trial's end until the next one of its sweep is submitted."""


LIVE = Timing(start=0.2, enter=0.2, leave=0.05, successor=0.05)
"""Seen on two cores, with warm fork servers."""
LIVE_PAUSE_SECONDS = 0.05


class SimulatedReplicas:
    def __init__(
        self,
        store: InMemoryTrialStore,
        launcher: InMemoryLauncher,
        trainings: Mapping[str, SimulatedTraining],
        timing: Timing,
        *,
        waits_for_step: bool,
        on_news: Callable[[], None],
        on_refusal: Callable[[], None] = lambda: None,
        reshape_of: Callable[[str, int], Reshape | None] = lambda trial_id, generation: None,
    ) -> None:
        """``waits_for_step``: a new generation is entered between two steps. ``on_news``: the loop would be woken.

        ``on_refusal``: it would decide at once, because a job has said that it has no room. ``reshape_of``: what a
        trial's replicas hear of with a generation in which they end, to go on with another layout.
        """
        self._store = store
        self._launcher = launcher
        self._trainings = trainings
        self._timing = timing
        self._waits_for_step = waits_for_step
        self._on_news = on_news
        self._on_refusal = on_refusal
        self._reshape_of = reshape_of
        self._enters: dict[str, tuple[int, float]] = {}
        """Trial -> the published generation, and when it is entered."""
        self._leaves: dict[str, float] = {}
        self._stands: dict[str, float] = {}
        """Replica -> when it has built what its trial goes on with in another layout."""

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
                elif self._comes_for_reshape(replica):
                    self._stand_by(replica, now)
                else:
                    self._become_ready(replica.replica_id, training.epoch if trial.members else None, now)
            if trial.switching and trial.entered < trial.published and now >= self._enters_at(trial, training, now):
                self._enter(trial, replicas, now)
        for replica_id in [replica_id for replica_id, at in self._stands.items() if at <= now]:
            del self._stands[replica_id]
            self._stand(replica_id, now)
        for replica_id in [replica_id for replica_id, at in self._leaves.items() if at <= now]:
            del self._leaves[replica_id]
            self._launcher.end(replica_id)
            self._store.writes += 1
            self._on_news()

    def _comes_for_reshape(self, replica: ReplicaRecord) -> bool:
        request = self._launcher.running.get(replica.replica_id)
        return request is not None and "ELASTUNE_RESHAPE" in request.environ

    def _stand_by(self, replica: ReplicaRecord, now: float) -> None:
        """It needs those that train, to go on with another layout."""
        if replica.ready_at is None:
            self._store.update_replica(replica.replica_id, contact_at=now, ready_at=now)
            self._on_news()

    def _stand(self, replica_id: str, now: float) -> None:
        """A process that has trained holds its part of another layout."""
        trial_id = replica_id.rpartition("-")[0]
        training = self._trainings.get(trial_id)
        replica = next((row for row in self._store.replicas(trial_id=trial_id) if row.replica_id == replica_id), None)
        if training is None or replica is None:
            return
        layout = self._store.trial(trial_id).layout
        if training.fits(layout):
            self._become_ready(replica_id, None, now)
        else:
            self._refuse(replica, training.refusal(layout))

    def _refuse(self, replica: ReplicaRecord, words: Hints) -> None:
        """Its model has no room, and it leaves for another layout."""
        self._store.put_hints(replica.trial_id, words.to_json())
        self._launcher.end(replica.replica_id, EXIT_PREEMPTED)
        self._store.writes += 1
        self._on_refusal()
        self._on_news()

    def _become_ready(self, replica_id: str, epoch: int | None, now: float) -> None:
        self._store.update_replica(replica_id, state=ReplicaState.READY, join_epoch=epoch, contact_at=now, ready_at=now)
        self._on_news()

    def _enters_at(self, trial: TrialRecord, training: SimulatedTraining, now: float) -> float:
        known = self._enters.get(trial.trial_id)
        if known is None or known[0] != trial.published:
            wait = training.seconds_to_next_step if self._waits_for_step else 0.0
            if set(trial.published_members) - set(trial.members):
                wait = max(wait, self._timing.enter)
            known = self._enters[trial.trial_id] = trial.published, now + wait
        return known[1]

    def _enter(self, trial: TrialRecord, replicas: list[ReplicaRecord], now: float) -> None:
        reshape = self._reshape_of(trial.trial_id, trial.published)
        stay = trial.published_members if reshape is None else reshape.processes
        if stay:
            self._store.note_entered(trial.trial_id, trial.published)
            self._on_news()
        for replica in replicas:
            if reshape is not None and replica.replica_id in stay:
                self._stands[replica.replica_id] = now + self._timing.enter
            left = replica.replica_id in trial.members and replica.replica_id not in stay
            if left and replica.replica_id in self._launcher.running:
                self.leave(replica.replica_id, now)

    def leave(self, replica_id: str, now: float) -> None:
        """It has made its last step."""
        if not self._timing.leave:
            self._launcher.end(replica_id)
            self._store.writes += 1
        else:
            self._leaves.setdefault(replica_id, now + self._timing.leave)

    def next_event(self, now: float) -> float:
        """When one of them is next done with something, if nothing else happens; infinite when none has anything."""
        times = [*self._leaves.values(), *self._stands.values()]
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
