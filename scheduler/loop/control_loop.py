"""The control loop: observe, allocate, plan, act; again and again, level-triggered.

A tick re-reads the store and the launcher, so nothing depends on having seen an event; a scheduler that starts on the
folder of a dead one simply ticks. Each action is safe to repeat. One thread ticks; API handlers only write facts
(a replica is ready, an outcome arrived) and wake it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from scheduler.knowledge.coming import Plans
from scheduler.knowledge.observer import Observer
from scheduler.loop.backoff import Backoff
from scheduler.loop.cpu_budget import CpuBudget
from scheduler.loop.hands import Hands
from scheduler.loop.happenings import Happenings
from scheduler.loop.hearing import Hearing
from scheduler.loop.journal import Journal
from scheduler.loop.lives import Lives
from scheduler.loop.settings import LoopSettings
from scheduler.loop.starts import Starts
from scheduler.loop.trial_files import TrialFiles
from scheduler.snapshot import Grant, Policy, Snapshot, TrialView, check_grants
from trials.errors import StoreUnavailable
from trials.launch.base import Launcher
from trials.record import Reason, ReplicaRecord, TrialRecord
from trials.states import TrialEvent
from trials.store import TrialStore

logger = logging.getLogger(__name__)

TICK_SECONDS = 0.5
"""Longest time between two looks; news from replicas and drivers is acted on at once."""
MOST_FAILURES = 20


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
        on_change: Callable[[], None] = lambda: None,
    ) -> None:
        self._store = store
        self._launcher = launcher
        self._policy = policy
        self._settings = settings
        self._clock = clock
        self._monotonic = monotonic
        self._on_change = on_change
        self._wake = threading.Event()
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None
        self._decided_at = float("-inf")
        self._changed = False
        """Something has happened that a decision should be made on at once; set by any thread."""
        self.latest_snapshot: Snapshot | None = None
        """What the last decision was made on."""
        self._grants: Mapping[str, Grant] = {}
        self.policy_error: Exception | None = None
        """Why the policy's last answer could not be used; None when it could."""
        self._plans: dict[str, Plans] = {}
        self.last_tick_seconds = 0.0
        """How long the last pass took, what is done after it included."""
        self._came_round_at: float | None = None
        self._failures: dict[tuple[str, str], int] = {}
        self._observer = Observer(store, launcher)
        self._backoff = Backoff()
        self._hearing = Hearing(monotonic, settings.silence_seconds)
        journal = Journal(store, policy)
        self._files = TrialFiles(settings.state_dir, store, launcher, monotonic)
        starts = Starts(store, launcher, journal, self._backoff, self._files, settings)
        self._happenings = Happenings(
            store,
            launcher,
            journal,
            self._backoff,
            self._files,
            starts,
            self._hearing,
            deaf_until=clock(),
            silence_seconds=settings.silence_seconds,
            on_loss=self._decide_on_loss_or_end,
        )
        self._hands = Hands(
            store,
            launcher,
            journal,
            self._backoff,
            self._files,
            starts,
            self._happenings,
            self._observer,
            settings,
        )
        self._lives = Lives(
            store, journal, self._backoff, self._files, self._happenings, self._observer, on_end=self._note_end
        )

    # ------------------------------------------------------------------ running

    def start(self) -> None:
        self._files.forget_old_checkpoints()
        self._thread = threading.Thread(target=self._run, name="control-loop", daemon=True)
        self._thread.start()

    @property
    def age(self) -> float:
        """Seconds since the loop last came round; 0 before it has begun, and when it has been told to stop."""
        if self._came_round_at is None or self._stopping.is_set():
            return 0.0
        return self._monotonic() - self._came_round_at

    def wake(self) -> None:
        self._wake.set()

    def stop(self) -> None:
        self._stopping.set()
        self._wake.set()
        if self._thread is not None:
            self._thread.join(timeout=30.0)

    def _run(self) -> None:
        budget = CpuBudget(self._monotonic())
        while not self._stopping.is_set():
            self._came_round_at = self._monotonic()
            self._wake.wait(TICK_SECONDS)
            self._wake.clear()
            if self._stopping.is_set():
                return
            if not self._settings.may_act():
                self._happenings.note_deafness(self._clock())
                continue
            began = time.thread_time()
            try:
                self.tick()
            except StoreUnavailable as error:
                # Trials go on training; what could not be written is seen again at the next tick.
                logger.error("tick given up error=%s", error)
                self._happenings.note_deafness(self._clock())
                time.sleep(TICK_SECONDS)
            except Exception:
                logger.exception("tick failed; allocations stay as they are")
                time.sleep(TICK_SECONDS)
            rest = budget.rest_after(time.thread_time() - began, self._monotonic())
            self._stopping.wait(min(TICK_SECONDS, rest))

    # ------------------------------------------------------------------ one pass

    def tick(self) -> None:
        """Every step re-reads what the one before it may have changed."""
        began = time.perf_counter()
        now = self._clock()
        self._happenings.look(now)
        for trial in self._store.trials(live_only=True):
            with self._contained(trial, "advance", now):
                self._lives.advance(trial, now)
        changed, self._changed = self._changed, False
        trials = self._store.trials(live_only=True)
        if changed or now - self._decided_at >= self._settings.decide_every_seconds:
            self._decide(trials, now)
        for trial in trials:
            grant = self._grants.get(trial.trial_id)
            if grant is not None:
                with self._contained(trial, "act", now):
                    self._hands.act_on(trial, grant, now)
        self._hands.stop_leftovers(now)
        self._on_change()
        self.last_tick_seconds = time.perf_counter() - began

    @contextmanager
    def _contained(self, trial: TrialRecord, step: str, now: float) -> Iterator[None]:
        """What goes wrong with one trial does not keep the others from being looked after.

        Only a mistake of ours leads here. The trial is tried again at the next looks, and ends when that never helps.
        """
        try:
            yield
        except StoreUnavailable:
            raise
        except Exception as error:
            key = trial.trial_id, step
            failures = self._failures[key] = self._failures.get(key, 0) + 1
            logger.exception("trial cannot be handled trial=%s times=%d", trial.trial_id, failures)
            if failures == MOST_FAILURES and not trial.state.is_final:
                sentence = f"the scheduler cannot handle it ({type(error).__name__}: {error}); its log tells more"
                self._lives.finish(trial, TrialEvent.GAVE_UP, Reason(code="internal_error", sentence=sentence), now)
        else:
            self._failures.pop((trial.trial_id, step), None)

    def _decide(self, trials: Sequence[TrialRecord], now: float) -> None:
        """Ask the policy; when it fails or grants what does not exist, allocations stay as they are."""
        self._decided_at = now
        try:
            snapshot = self._observer.snapshot(
                trials,
                now,
                backing_off=self._backoff.trials(now),
                plans=self._plans,
                granted=self._grants,
            )
            self.latest_snapshot = snapshot
            grants = self._policy.allocate(snapshot)
            check_grants(snapshot, grants)
        except StoreUnavailable:
            raise
        except Exception as error:
            self.policy_error = error
            logger.exception("policy failed policy=%s; allocations stay as they are", self._policy.name)
            return
        self.policy_error = None
        # While a change is carried out, it is for the reason that it was decided for.
        lasting = {name for name in self._observer.under_way if grants[name].reason.code == "unchanged"}
        self._grants = {**grants, **{name: self._grants[name] for name in lasting}}

    def _decide_on_loss_or_end(self) -> None:
        if self._settings.decide_on_loss_or_end:
            self.decide_anew()

    def _note_end(self, trial_id: str) -> None:
        self._hands.forget(trial_id)
        self._decide_on_loss_or_end()

    # ------------------------------------------------------------------ what it is told, by any thread

    def decide_anew(self) -> None:
        """At the next look, whenever the last decision was."""
        self._changed = True

    def note_contact(self, replica_id: str) -> None:
        """The replica has just called."""
        self._hearing.note(replica_id)

    def note_leaving(self, replica_id: str) -> None:
        """The replica was told to end by whoever runs its machine."""
        self._happenings.note_leaving(replica_id)

    def note_broken(self, trial_id: str) -> None:
        """A replica of this trial waits for the others that are left, because a collective failed."""
        self._happenings.note_broken(trial_id, self._clock())

    def note_whole(self, trial_id: str) -> None:
        """The trial's replicas train together."""
        self._happenings.note_whole(trial_id)

    def note_plans(self, study: str, plans: Plans) -> None:
        """Its driver says what it is going to submit."""
        self._plans[study] = plans

    def end_replica(self, replica: ReplicaRecord) -> None:
        """End a replica now; from the shutdown path, after its time to save is over."""
        self._launcher.stop(replica, force=True)

    # ------------------------------------------------------------------ what it has forgotten

    def forget_study(self, study: str) -> None:
        """Its store has forgotten it."""
        self._plans.pop(study, None)

    def forget_trial(self, trial_id: str) -> None:
        """It ended long ago, and its store has forgotten it."""
        self._files.forget_logs(trial_id)
        self._observer.forget(trial_id)
        self._backoff.forget(trial_id)
        self._lives.forget(trial_id)
        for key in [key for key in self._failures if key[0] == trial_id]:
            del self._failures[key]

    def forget_logs(self, trial_id: str) -> None:
        """What the trial's replicas printed is not wanted any more."""
        self._files.forget_logs(trial_id)

    # ------------------------------------------------------------------ what it shows

    def logs(self, trial_id: str) -> list[Path]:
        """Files with what a trial's replicas printed, oldest first. Callable from any thread."""
        return self._files.logs(trial_id)

    @property
    def latest_views(self) -> Mapping[str, TrialView]:
        """What the last tick saw of each live trial; for display only."""
        return self._observer.latest_views

    @property
    def policy_name(self) -> str:
        return self._policy.name

    @property
    def latest_grants(self) -> Mapping[str, Grant]:
        """The policy's last answer."""
        return self._grants
