"""The control loop: observe, allocate, plan, act; again and again, level-triggered.

A tick re-reads the store and the launcher, so nothing depends on having seen an event; a scheduler that starts on the
folder of a dead one simply ticks. Each action is safe to repeat. One thread ticks; API handlers only write facts
(a replica is ready, an outcome arrived) and wake it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
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
from scheduler.snapshot import Policy
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
        self.observer = Observer(store, launcher)
        self._backoff = Backoff()
        self.decisions = Decisions(policy, self.observer, self._backoff, every_seconds=settings.decide_every_seconds)
        journal = Journal(store, policy)
        self.liveness = Liveness(launcher, journal, monotonic, settings.silence_seconds)
        self.files = TrialFiles(settings.state_dir, store, launcher, monotonic, one_machine=settings.one_machine)
        self.inheritance = Inheritance(store, self.files, journal, on_release=lambda: self.decisions.decide_anew())
        starts = Starts(store, launcher, journal, self._backoff, self.files, settings)
        self.observations = Observations(
            store,
            launcher,
            journal,
            self._backoff,
            self.files,
            starts,
            self.liveness,
            deaf_until=clock(),
            on_loss=self._decide_on_loss_or_end,
        )
        self._executor = Executor(
            store,
            launcher,
            journal,
            self._backoff,
            self.files,
            starts,
            self.observations,
            self.observer,
            settings,
        )
        self._lifecycle = Lifecycle(
            store, journal, self._backoff, self.files, self.observations, self.observer, on_end=self._note_end
        )
        self.thread = LoopThread(self.tick, may_act=settings.may_act, on_deaf=self._note_deafness, monotonic=monotonic)

    # ------------------------------------------------------------------ running

    def start(self) -> None:
        self.files.settle_ended()
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
        self.observations.note_deafness(self._clock())

    # ------------------------------------------------------------------ one pass

    def tick(self) -> None:
        """Look, decide and act once; every step re-reads what the one before it may have changed."""
        began = time.perf_counter()
        now = self._clock()
        self.observations.look(now)
        for trial in self._store.trials(live_only=True):
            with self._containment.around(trial, "advance"):
                self._lifecycle.advance(trial, now)
            if trial.spec.parent_epoch:
                with self._containment.around(trial, "inherit"):
                    self.inheritance.is_settled(trial, now)
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
            settled = self.inheritance.is_settled(trial, now)
            comes_soon = self._settings.shares_files and not trial.spec.parent_epoch
            return settled or (comes_soon and trial.spec.parent in self.inheritance.asked)
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
        self.inheritance.forget(trial_id)
        self._decide_on_loss_or_end()

    def end_replica(self, replica: ReplicaRecord) -> None:
        """End a replica now; from the shutdown path, after its time to save is over."""
        self._launcher.stop(replica, force=True)

    # ------------------------------------------------------------------ what it has forgotten

    def forget_trial(self, trial_id: str) -> None:
        """Forget a trial that ended long ago, and that the store has forgotten."""
        self.files.forget_logs(trial_id)
        self.files.forget_checkpoints(trial_id)
        self.observer.forget(trial_id)
        self._backoff.forget(trial_id)
        self._lifecycle.forget(trial_id)
        self._containment.forget(trial_id)

    # ------------------------------------------------------------------ what it shows

    @property
    def state_dir(self) -> Path:
        """Return the folder in which this machine's scheduler keeps its files."""
        return self._settings.state_dir

    def log_of(self, replica_id: str) -> Path | None:
        """Return the file with a replica's output; None if it is not known. Callable from any thread."""
        trial_id = replica_id.rpartition("-")[0]
        rows = self._store.replicas(trial_id=trial_id, live_only=False)
        return next((self.files.log(row) for row in rows if row.replica_id == replica_id), None)

    def checkpoints_of(self, trial_id: str) -> Path | None:
        """Return the folder of a trial's checkpoints; None where nobody wants them. Callable from any thread."""
        try:
            is_over = self._store.trial(trial_id).state.is_final
        except UnknownTrial:
            return None
        return None if is_over else self.files.checkpoint_dir(trial_id)

    def trains(self, trial_id: str) -> bool:
        """Tell whether a replica that starts now gets the trial's state from others. Callable from any thread."""
        return bool(self._store.trial(trial_id).members)


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
