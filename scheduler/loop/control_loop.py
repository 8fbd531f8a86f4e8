"""The control loop: observe, allocate, plan, act; again and again, level-triggered.

A tick re-reads the store and the launcher, so nothing depends on having seen an event; a scheduler that starts on the
folder of a dead one simply ticks. Each action is safe to repeat. One thread ticks; API handlers only write facts
(a replica is ready, an outcome arrived) and wake it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from scheduler.knowledge.observer import Observer
from scheduler.loop.backoff import Backoff
from scheduler.loop.decisions import Decisions
from scheduler.loop.executor import Executor
from scheduler.loop.inheritance import Inheritance, ParentStateMissing
from scheduler.loop.journal import Journal
from scheduler.loop.lifecycle import Lifecycle
from scheduler.loop.liveness import Liveness
from scheduler.loop.loop_thread import LoopThread
from scheduler.loop.observations import Observations
from scheduler.loop.settings import LoopSettings
from scheduler.loop.starts import Starts
from scheduler.loop.trial_files import TrialFiles
from scheduler.snapshot import Policy, TrialView
from trials.errors import StoreUnavailable, UnknownTrial
from trials.launch.base import Launcher
from trials.record import Reason, ReplicaRecord, TrialRecord
from trials.states import TrialEvent
from trials.store import TrialStore


class ControlLoop:
    def __init__(
        self,
        store: TrialStore,
        launcher: Launcher,
        policy: Policy,
        settings: LoopSettings,
        *,
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store = store
        self._launcher = launcher
        self._settings = settings
        self._clock = clock
        self.after_look: list[Callable[[], None]] = []
        """Called in order, by the loop's thread, when it has looked at everything."""
        self.last_tick_seconds = 0.0
        """Seconds of the last pass, what is done after it included."""
        self._containment = Containment(self._give_up)
        self._observer = Observer(store, launcher)
        self._backoff = Backoff()
        self.decisions = Decisions(policy, self._observer, self._backoff, every_seconds=settings.decide_every_seconds)
        journal = Journal(store, policy)
        self._liveness = Liveness(launcher, journal, monotonic, settings.silence_seconds)
        self._files = TrialFiles(settings.state_dir, store, launcher, monotonic, one_machine=settings.one_machine)
        self._inheritance = Inheritance(store, self._files, journal, on_release=lambda: self.decisions.decide_anew())
        starts = Starts(store, launcher, journal, self._backoff, self._files, settings)
        self._observations = Observations(
            store,
            launcher,
            journal,
            self._backoff,
            self._files,
            starts,
            self._liveness,
            deaf_until=clock(),
            on_loss=self._decide_on_loss_or_end,
        )
        self._executor = Executor(
            store,
            launcher,
            journal,
            self._backoff,
            self._files,
            starts,
            self._observations,
            self._observer,
            settings,
        )
        self._lifecycle = Lifecycle(
            store, journal, self._backoff, self._files, self._observations, self._observer, on_end=self._note_end
        )
        self.thread = LoopThread(self.tick, may_act=settings.may_act, on_deaf=self._note_deafness, monotonic=monotonic)

    # ------------------------------------------------------------------ running

    def start(self) -> None:
        self._files.settle_ended()
        self.thread.start()

    @property
    def age(self) -> float:
        """Seconds since the loop last came round; 0 before it has begun, and when it has been told to stop."""
        return self.thread.age

    def wake(self) -> None:
        self.thread.wake()

    def stop(self) -> None:
        self.thread.stop()

    def _note_deafness(self) -> None:
        self._observations.note_deafness(self._clock())

    # ------------------------------------------------------------------ one pass

    def tick(self) -> None:
        """Look, decide and act once; every step re-reads what the one before it may have changed."""
        began = time.perf_counter()
        now = self._clock()
        self._observations.look(now)
        for trial in self._store.trials(live_only=True):
            with self._containment.around(trial, "advance"):
                self._lifecycle.advance(trial, now)
            if trial.spec.parent_epoch:
                with self._containment.around(trial, "inherit"):
                    self._inheritance.is_settled(trial, now)
        due = self.decisions.take_due(now)
        trials = self._store.trials(live_only=True)
        if due:
            self.decisions.decide(trials, now)
        for trial in trials:
            grant = self.decisions.grants.get(trial.trial_id)
            if grant is not None:
                with self._containment.around(trial, "act"):
                    if not grant.slots or self._may_start(trial, now):
                        self._executor.act_on(trial, grant, now)
        self._executor.stop_leftovers(now)
        for call in self.after_look:
            call()
        self.last_tick_seconds = time.perf_counter() - began

    def _may_start(self, trial: TrialRecord, now: float) -> bool:
        """Tell whether a trial may start: its parent's state is there, or comes while its replicas start."""
        try:
            settled = self._inheritance.is_settled(trial, now)
            comes_soon = self._settings.shares_files and not trial.spec.parent_epoch
            return settled or (comes_soon and trial.spec.parent in self._inheritance.asked)
        except ParentStateMissing as error:
            self._give_up(trial, Reason(code="parent_state_missing", sentence=str(error)))
            return False

    def _give_up(self, trial: TrialRecord, reason: Reason) -> None:
        self._lifecycle.finish(trial, TrialEvent.GAVE_UP, reason, self._clock())

    def _decide_on_loss_or_end(self) -> None:
        if self._settings.decide_on_loss_or_end:
            self.decisions.decide_anew()

    def _note_end(self, trial_id: str) -> None:
        self._executor.forget(trial_id)
        self._inheritance.forget(trial_id)
        self._decide_on_loss_or_end()

    # ------------------------------------------------------------------ what it is told, by any thread

    def note_contact(self, replica_id: str) -> None:
        """Note that the replica has just called."""
        self._liveness.note(replica_id)

    def note_leaving(self, replica_id: str) -> None:
        """Note that whoever runs its machine has told the replica to end."""
        self._observations.note_leaving(replica_id)

    def note_broken(self, trial_id: str) -> None:
        """Note that a replica of this trial waits for the others that are left, because a collective failed."""
        self._observations.note_broken(trial_id, self._clock())

    def note_whole(self, trial_id: str) -> None:
        """Note that the trial's replicas train together."""
        self._observations.note_whole(trial_id)

    def end_replica(self, replica: ReplicaRecord) -> None:
        """End a replica now; from the shutdown path, after its time to save is over."""
        self._launcher.stop(replica, force=True)

    # ------------------------------------------------------------------ what it has forgotten

    def forget_trial(self, trial_id: str) -> None:
        """Forget a trial that ended long ago, and that the store has forgotten."""
        self._files.forget_logs(trial_id)
        self._files.forget_checkpoints(trial_id)
        self._observer.forget(trial_id)
        self._backoff.forget(trial_id)
        self._lifecycle.forget(trial_id)
        self._containment.forget(trial_id)

    def forget_logs(self, trial_id: str) -> None:
        """Forget what the trial's replicas printed."""
        self._files.forget_logs(trial_id)

    # ------------------------------------------------------------------ what it shows

    @property
    def state_dir(self) -> Path:
        """Return the folder in which this machine's scheduler keeps its files."""
        return self._settings.state_dir

    def log_of(self, replica_id: str) -> Path | None:
        """Return the file with a replica's output; None if it is not known. Callable from any thread."""
        trial_id = replica_id.rpartition("-")[0]
        rows = self._store.replicas(trial_id=trial_id, live_only=False)
        return next((self._files.log(row) for row in rows if row.replica_id == replica_id), None)

    def checkpoints_of(self, trial_id: str) -> Path | None:
        """Return the folder of a trial's checkpoints; None where nobody wants them. Callable from any thread."""
        try:
            is_over = self._store.trial(trial_id).state.is_final
        except UnknownTrial:
            return None
        return None if is_over else self._files.checkpoint_dir(trial_id)

    def has_state(self, trial_id: str) -> bool:
        """Tell whether a trial could begin with what this one has saved. Callable from any thread."""
        return self._files.has_state(trial_id)

    def kept_after(self, trial: TrialRecord) -> list[int]:
        """Return the epochs after which the trial's state was kept. Callable from any thread."""
        return self._files.kept_after(trial)

    def trains(self, trial_id: str) -> bool:
        """Tell whether a replica that starts now gets the trial's state from others. Callable from any thread."""
        return bool(self._store.trial(trial_id).members)

    def logs(self, trial_id: str) -> list[Path]:
        """Files with what a trial's replicas printed, oldest first. Callable from any thread."""
        return self._files.logs(trial_id)

    @property
    def asked_to_save(self) -> Mapping[str, str]:
        """Return the trials whose replicas are to save now, each with the mark of the request."""
        return self._inheritance.asked

    @property
    def latest_views(self) -> Mapping[str, TrialView]:
        """Return the last tick's view of each live trial, for display only."""
        return self._observer.latest_views


logger = logging.getLogger(__name__)

MOST_FAILURES = 20


class Containment:
    """Keeps a mistake in the handling of one trial from all others.

    ``give_up``: ends a trial, for this reason. Only a mistake of ours leads here.

    The trial is tried again at the next looks, and ends when that never helps.
    """

    def __init__(self, give_up: Callable[[TrialRecord, Reason], None]) -> None:
        self._give_up = give_up
        self._failures: dict[tuple[str, str], int] = {}

    @contextmanager
    def around(self, trial: TrialRecord, step: str) -> Iterator[None]:
        """Contain failures of work for one trial; ``step`` tells one kind of work from another."""
        try:
            yield
        except StoreUnavailable:
            raise
        except Exception as error:
            key = trial.trial_id, step
            failures = self._failures[key] = self._failures.get(key, 0) + 1
            logger.exception("error while handling a trial trial=%s times=%d", trial.trial_id, failures)
            if failures == MOST_FAILURES and not trial.state.is_final:
                sentence = (
                    f"the scheduler failed {MOST_FAILURES} times to handle it ({type(error).__name__}: {error}); see "
                    "the scheduler's log"
                )
                self._give_up(trial, Reason(code="internal_error", sentence=sentence))
        else:
            self._failures.pop((trial.trial_id, step), None)

    def forget(self, trial_id: str) -> None:
        for key in [key for key in self._failures if key[0] == trial_id]:
            del self._failures[key]
