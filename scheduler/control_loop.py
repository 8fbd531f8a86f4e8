"""The control loop: observe, allocate, plan, act; again and again, level-triggered.

A tick re-reads the store and the launcher, so nothing depends on having seen an event; a scheduler that starts on the
folder of a dead one simply ticks. Each action is safe to repeat. One thread ticks; API handlers only write facts
(a replica is ready, an outcome arrived) and wake it.
"""

from __future__ import annotations

import logging
import shutil
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from dist_core.link.environment import EXIT_PREEMPTED, ReplicaEnvironment
from scheduler.coming import Plans
from scheduler.cpu_budget import CpuBudget
from scheduler.hearing import Hearing
from scheduler.losses import found_no_room, judge
from scheduler.observer import Observer
from scheduler.snapshot import Grant, Policy, Snapshot, TrialView, check_grants
from trials.errors import LaunchFailed, StoreUnavailable
from trials.launch.base import NO_ROOM, Exit, Launcher, LaunchRequest, NodeSlots, ReplicaProcess
from trials.log_files import last_words, shorten
from trials.plan import Launch, Publish, RetryJoin, Stop, plan
from trials.record import Reason, ReplicaRecord, ReplicaState, TrialRecord
from trials.states import TrialEvent, TrialState, next_state
from trials.store import TrialStore
from trials.store.base import HistoryEntry

logger = logging.getLogger(__name__)

TICK_SECONDS = 0.5
"""Longest time between two looks; news from replicas and drivers is acted on at once."""
OWNER_LEASE_SECONDS = 20.0
"""A study whose driver has not asked for news for so long is paused: nobody would take its results."""
LAUNCH_BACKOFF_SECONDS = 2.0
MOST_FAILURES = 20
LOG_SECONDS = 10.0
"""Between two looks at the size of the replicas' logs."""
FAILED_JOIN_SECONDS = 30.0
"""After a joiner failed, its trial is not grown again for so long."""

WHO = {
    TrialEvent.VALUE_RETURNED: "trial",
    TrialEvent.PRUNED_BY_TUNER: "tuner",
    TrialEvent.CANCELLED_BY_OWNER: "owner",
}
"""Whose doing an event is, where it is not the scheduler's."""


class Clock(Protocol):
    def __call__(self) -> float: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopSettings:
    state_dir: Path
    api_url: Callable[[], str]
    """Where replicas reach the scheduler; known once the server listens."""
    replica_token: Callable[[str], str]
    """A replica's own, by its id."""
    base_environ: Mapping[str, str]
    """Environment that replicas inherit."""
    server_file: Path | None = None
    decide_every_seconds: float = 0.0
    """Least time between two decisions of the policy; in between, the last one is carried out. 0: at every tick."""
    silence_seconds: float = 45.0
    """A replica that has been heard of and then says nothing for so long hangs: it is ended, and its trial heals."""
    decide_on_loss_or_end: bool = False
    """Do not wait for that time when a replica is gone or a trial over."""
    leaving_seconds: float = 1.0
    """How long replicas of a trial that is over may take to end by themselves."""
    may_act: Callable[[], bool] = lambda: True
    """Whether this scheduler still is the one that decides; else it only answers."""
    move_patience_seconds: float = 10.0
    """A trial that is to move to slots which others hold waits so long before it gives up its own."""


class ControlLoop:
    def __init__(
        self,
        store: TrialStore,
        launcher: Launcher,
        policy: Policy,
        settings: LoopSettings,
        *,
        clock: Clock = time.time,
        monotonic: Clock = time.monotonic,
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
        self._deaf_until = clock()
        self._launch_not_before: dict[str, float] = {}
        self._moving: set[str] = set()
        """Trials of which some replicas leave when others have joined elsewhere; told as one change."""
        self._blocked_since: dict[str, float] = {}
        self._progress_at_loss: dict[str, float] = {}
        self._why_gone: dict[str, Exit] = {}
        """What the launcher knew of the end of replicas, until their trial has been judged."""
        self._decided_at = float("-inf")
        self._changed = False
        """Something has happened that a decision should be made on at once; set by any thread."""
        self.latest_snapshot: Snapshot | None = None
        """What the last decision was made on."""
        self._grants: Mapping[str, Grant] = {}
        self.policy_error: Exception | None = None
        """Why the policy's last answer could not be used; None when it could."""
        self._observer = Observer(store, launcher)
        self._plans: dict[str, Plans] = {}
        self._leaving: set[str] = set()
        """Replicas that somebody outside wants gone; a new scheduler hears of them when they have left."""
        self._starting: set[str] = set()
        """Replicas whose process is not known yet."""
        self._hearing = Hearing(monotonic, settings.silence_seconds)
        self.last_tick_seconds = 0.0
        """How long the last pass took, what is done after it included."""
        self._came_round_at: float | None = None
        self._failures: dict[tuple[str, str], int] = {}
        self._logs_seen_at = monotonic()

    # ------------------------------------------------------------------ running

    def start(self) -> None:
        self._remove_old_checkpoints()
        self._thread = threading.Thread(target=self._run, name="control-loop", daemon=True)
        self._thread.start()

    def _remove_old_checkpoints(self) -> None:
        """Of trials that ended just before an earlier scheduler did."""
        for trial in self._store.trials():
            if trial.state.is_final:
                shutil.rmtree(self._checkpoint_dir(trial), ignore_errors=True)

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
                self._deaf_until = self._clock()
                self._hearing.was_deaf()
                continue
            began = time.thread_time()
            try:
                self.tick()
            except StoreUnavailable as error:
                # Trials go on training; what could not be written is seen again at the next tick.
                logger.error("tick given up error=%s", error)
                self._deaf_until = self._clock()
                self._hearing.was_deaf()
                time.sleep(TICK_SECONDS)
            except Exception:
                logger.exception("tick failed; allocations stay as they are")
                time.sleep(TICK_SECONDS)
            rest = budget.rest_after(time.thread_time() - began, self._monotonic())
            self._stopping.wait(min(TICK_SECONDS, rest))

    def tick(self) -> None:
        """One pass: every step re-reads what the one before it may have changed."""
        began = time.perf_counter()
        now = self._clock()
        if not self._hearing.look():
            self._deaf_until = now
        self._shorten_logs()
        self._end_silent(now)
        self._note_starts(now)
        self._note_exits(now)
        self._follow_owners(now)
        for trial in self._store.trials(live_only=True):
            with self._contained(trial, "advance", now):
                self._advance(trial, now)
        changed, self._changed = self._changed, False
        trials = self._store.trials(live_only=True)
        if changed or now - self._decided_at >= self._settings.decide_every_seconds:
            self._decide(trials, now)
        self._act(trials, self._grants, now)
        self._stop_leftovers(now)
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
                self._finish(trial, TrialEvent.GAVE_UP, Reason(code="internal_error", sentence=sentence), now)
        else:
            self._failures.pop((trial.trial_id, step), None)

    def _decide(self, trials: Sequence[TrialRecord], now: float) -> None:
        """Ask the policy; when it fails or grants what does not exist, allocations stay as they are."""
        self._decided_at = now
        try:
            snapshot = self._observer.snapshot(
                trials,
                now,
                backing_off=self._backing_off(now),
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

    def forget_study(self, study: str) -> None:
        """Its store has forgotten it."""
        self._plans.pop(study, None)

    def note_plans(self, study: str, plans: Plans) -> None:
        """Its driver says what it is going to submit; from API handlers."""
        self._plans[study] = plans

    def decide_anew(self) -> None:
        """At the next look, whenever the last decision was; from any thread."""
        self._changed = True

    def _decide_on_loss_or_end(self) -> None:
        if self._settings.decide_on_loss_or_end:
            self.decide_anew()

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

    # ------------------------------------------------------------------ what happened

    def _note_starts(self, now: float) -> None:
        """Of replicas whose launcher could not tell at once what came of them."""
        if not self._starting:
            return
        rows = {replica.replica_id: replica for replica in self._store.replicas()}
        for replica_id in sorted(self._starting):
            try:
                process = self._launcher.started(replica_id)
            except LaunchFailed as error:
                self._starting.discard(replica_id)
                if replica_id in rows:
                    self._note_not_started(rows[replica_id], error, now)
                continue
            if process is None:
                continue
            self._starting.discard(replica_id)
            row = rows.get(replica_id)
            if row is not None:
                self._note_process(row, process)
                if row.stop_requested_at is not None:
                    self._launcher.stop(replace(row, pid=process.pid, process_started=process.started), force=True)

    def _note_exits(self, now: float) -> None:
        replicas = self._store.replicas()
        by_id = {replica.replica_id: replica for replica in replicas}
        for replica in replicas:
            if replica.pid is None and replica.replica_id not in self._starting:
                # A scheduler died between writing the row and starting the process. Should the process exist after
                # all, the API refuses it and it leaves.
                self._store.update_replica(replica.replica_id, state=ReplicaState.GONE, gone_at=now)
        for gone in self._launcher.exits(replicas):
            replica = by_id[gone.replica_id]
            if gone.code != "node_lost":
                self._launcher.collect_log(replica, self._log(replica))
            self._store.update_replica(gone.replica_id, state=ReplicaState.GONE, gone_at=now, exit_status=gone.status)
            self._decide_on_loss_or_end()
            if replica.stop_requested_at is None:
                self._note_unasked(replica, gone, now)
            self._leaving.discard(gone.replica_id)
            logger.info("replica gone trial=%s replica=%s status=%s", replica.trial_id, gone.replica_id, gone.status)

    def _note_unasked(self, replica: ReplicaRecord, gone: Exit, now: float) -> None:
        """The end of a replica that was not asked to end."""
        if gone.why:
            self._why_gone[gone.replica_id] = gone
            reason = Reason(code=gone.code, sentence=f"replica {gone.replica_id} was ended: {gone.why}")
            self._note(replica.trial_id, "warning", reason, now)
        if replica.join_epoch is not None or replica.launch_index > 0:
            self._note_failed_joiner(replica, gone.status, now)
        never_trained = replica.state is not ReplicaState.ACTIVE
        if gone.status == 0 and never_trained and self._store.trial(replica.trial_id).members:
            # It came when the trial was about over, and so would the next one.
            self._launch_not_before[replica.trial_id] = now + FAILED_JOIN_SECONDS

    def note_contact(self, replica_id: str) -> None:
        """The replica has just called; from API handlers."""
        self._hearing.note(replica_id)

    def note_leaving(self, replica_id: str) -> None:
        """The replica was told to end by whoever runs its machine; from API handlers."""
        self._leaving.add(replica_id)

    def _shorten_logs(self) -> None:
        if self._monotonic() - self._logs_seen_at < LOG_SECONDS:
            return
        self._logs_seen_at = self._monotonic()
        for replica in self._store.replicas():
            if shorten(self._log(replica)):
                logger.info("log shortened trial=%s replica=%s", replica.trial_id, replica.replica_id)

    def _end_silent(self, now: float) -> None:
        for replica in self._hearing.silent(self._store.replicas()):
            logger.warning("replica silent trial=%s replica=%s: ending it", replica.trial_id, replica.replica_id)
            silence = f"{self._settings.silence_seconds:.0f} s"
            sentence = f"replica {replica.replica_id} said nothing for {silence} and was ended"
            reason = Reason(code="silent", sentence=sentence)
            self._note(replica.trial_id, "warning", reason, now)
            self._launcher.stop(replica, force=True)

    def _note_failed_joiner(self, replica: ReplicaRecord, status: int | None, now: float) -> None:
        """A joiner that ended by itself would end so again: do not start the next one at once."""
        trial = self._store.trial(replica.trial_id)
        if status in (1, None) and trial.members and replica.replica_id not in trial.members:
            self._launch_not_before[trial.trial_id] = now + FAILED_JOIN_SECONDS
            reason = Reason(
                code="join_failed",
                sentence=f"replica {replica.replica_id} ended before it could join; its log tells why",
            )
            self._note(trial.trial_id, "warning", reason, now)

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
                self._store.hold(left, "its driver is gone; start the same sweep again with resume=True to go on")
                logger.info("study held study=%s trials=%d", study.name, len(left))

    def _advance(self, trial: TrialRecord, now: float) -> None:
        """Move one trial along its transition table by what is known of it."""
        trial = self._settle_switch(trial, now)
        replicas = self._store.replicas(trial_id=trial.trial_id)
        if trial.state in (TrialState.PENDING, TrialState.PAUSED) and replicas:
            # A scheduler died between launching and noting it.
            self._move(trial, TrialEvent.LAUNCHED, trial.reason, now)
            trial = self._store.trial(trial.trial_id)
        if trial.outcome is not None and trial.state is not TrialState.PENDING:
            self._finish_with_outcome(trial, now)
        elif trial.cancel_requested is not None:
            self._finish(
                trial, TrialEvent.CANCELLED_BY_OWNER, Reason(code="cancelled", sentence=trial.cancel_requested), now
            )
        elif trial.state.holds_slots and not replicas:
            self._empty(trial, now)
        elif trial.state is TrialState.STARTING and (trial.members or self._runs_plain(trial)):
            self._move(trial, TrialEvent.TRAINS, Reason(code="trains", sentence="its first replicas train"), now)
        elif trial.state is TrialState.RUNNING and (trial.switching or self._has_joiners(trial, replicas)):
            self._move(trial, TrialEvent.RESCALE_BEGAN, trial.reason, now)
        elif trial.state is TrialState.RESCALING and not trial.switching and not self._has_joiners(trial, replicas):
            self._move(trial, TrialEvent.RESCALE_ENDED, trial.reason, now)

    def _settle_switch(self, trial: TrialRecord, now: float) -> TrialRecord:
        """Take note of a published generation that was entered, or given up, since the last look."""
        if not trial.switching:
            return trial
        if trial.entered == trial.published:
            settled = replace(trial, generation=trial.published, members=trial.published_members, rescaled_at=now)
            self._store.set_replica_state(trial.published_members, ReplicaState.ACTIVE)
        elif trial.abandoned == trial.published:
            settled = replace(trial, generation=trial.published, published_members=trial.members)
            # A joiner that has noticed by itself aims at a later epoch already.
            joiners = [
                replica
                for replica in self._store.replicas(trial_id=trial.trial_id)
                if replica.replica_id not in trial.members and replica.join_epoch == trial.join_epoch
            ]
            self._retry(joiners)
        else:
            return trial
        self._store.save_trial(settled)
        return settled

    @staticmethod
    def _has_joiners(trial: TrialRecord, replicas: Sequence[ReplicaRecord]) -> bool:
        return bool(trial.members) and any(replica.replica_id not in trial.members for replica in replicas)

    def _runs_plain(self, trial: TrialRecord) -> bool:
        """Reports come in although no generation formed: code that does not use the adaptive core."""
        return trial.published == 0 and self._store.has_reported(trial.trial_id)

    def _finish_with_outcome(self, trial: TrialRecord, now: float) -> None:
        outcome = trial.outcome
        assert outcome is not None
        if outcome.kind == "value":
            event, reason = (
                TrialEvent.VALUE_RETURNED,
                Reason(code="finished", sentence=f"returned {_shown(outcome.value)}"),
            )
        elif outcome.kind == "pruned":
            event, reason = TrialEvent.PRUNED_BY_TUNER, Reason(code="pruned", sentence=outcome.message or "pruned")
        else:
            sentence = f"{outcome.error_type}: {outcome.message}"
            event, reason = TrialEvent.GAVE_UP, Reason(code="user_exception", sentence=sentence)
        self._finish(trial, event, reason, now)

    def _finish(self, trial: TrialRecord, event: TrialEvent, reason: Reason, now: float) -> None:
        self._decide_on_loss_or_end()
        self._move(trial, event, reason, now, finished_at=now)
        self._observer.note_end(trial, next_state(trial.state, event))
        self._moving.discard(trial.trial_id)
        for kept in (self._blocked_since, self._progress_at_loss, self._launch_not_before):
            kept.pop(trial.trial_id, None)
        for replica_id in [name for name in self._why_gone if name.startswith(trial.trial_id)]:
            del self._why_gone[replica_id]
        shutil.rmtree(self._checkpoint_dir(trial), ignore_errors=True)

    def _empty(self, trial: TrialRecord, now: float) -> None:
        """No replica is left and no outcome came: paused as asked, or lost."""
        last = self._store.replicas(trial_id=trial.trial_id, live_only=False)
        ended = last[-max(1, len(trial.members)) :]
        statuses = {replica.exit_status for replica in ended}
        asked = trial.switching and not trial.published_members
        stopped = all(replica.stop_requested_at is not None for replica in ended)
        preempted = statuses <= {EXIT_PREEMPTED} or stopped
        losses = trial.losses
        told = {row.replica_id: self._why_gone.pop(row.replica_id, None) for row in ended}
        why = next((each.why for each in told.values() if each is not None), "")
        if asked or preempted:
            reason = Reason(code="paused", sentence=trial.hold or "saved its state and gave its slots back")
        elif found_no_room(ended, told):
            # Nothing of its own went wrong.
            self._launch_not_before[trial.trial_id] = now + FAILED_JOIN_SECONDS
            reason = Reason(code=NO_ROOM, sentence=f"tries again in {FAILED_JOIN_SECONDS:.0f} s: {why}")
        else:
            verdict = judge(
                statuses,
                next((words for row in reversed(ended) if (words := last_words(self._log(row)))), ""),
                why,
                losses=trial.losses,
                max_losses=trial.spec.max_losses,
                progressed=self._got_on(trial),
            )
            if verdict.gives_up:
                self._finish(trial, TrialEvent.GAVE_UP, verdict.reason, now)
                return
            losses, reason = verdict.losses, verdict.reason
            self._launch_not_before[trial.trial_id] = now + verdict.wait_seconds
        self._move(
            trial,
            TrialEvent.EMPTIED,
            reason,
            now,
            losses=losses,
            members=(),
            generation=max(trial.generation, trial.published),
            published=max(trial.generation, trial.published),
            published_members=(),
        )

    def _got_on(self, trial: TrialRecord) -> bool:
        """Whether the trial has made progress since its replicas were last lost."""
        progress = self._observer.progress(trial.trial_id)
        before = self._progress_at_loss.get(trial.trial_id)
        self._progress_at_loss[trial.trial_id] = max(progress, before or 0.0)
        return progress > (0.0 if before is None else before)

    def _move(self, trial: TrialRecord, event: TrialEvent, reason: Reason, now: float, **changes: object) -> None:
        state = next_state(trial.state, event)
        self._store.save_trial(replace(trial, state=state, reason=reason, **changes))  # type: ignore[arg-type]  # fields by name
        self._note(trial.trial_id, state.value, reason, now, who=WHO.get(event, "scheduler"))
        if state is not TrialState.RESCALING:
            logger.info("trial %s trial=%s reason=%s: %s", state.value, trial.trial_id, reason.code, reason.sentence)

    def _note(self, trial_id: str, what: str, reason: Reason, now: float, *, who: str = "scheduler") -> None:
        self._store.add_history(HistoryEntry(at=now, trial_id=trial_id, what=what, reason=reason, who=who))

    def _backing_off(self, now: float) -> set[str]:
        """Trials that must not be given further replicas yet."""
        return {trial_id for trial_id, until in self._launch_not_before.items() if now < until}

    # ------------------------------------------------------------------ act

    def _act(self, trials: Sequence[TrialRecord], grants: Mapping[str, Grant], now: float) -> None:
        for trial in trials:
            grant = grants.get(trial.trial_id)
            if grant is not None:
                with self._contained(trial, "act", now):
                    self._act_on(trial, grant, now)

    def _act_on(self, trial: TrialRecord, grant: Grant, now: float) -> None:
        self._note_reason(trial, grant, now)
        replicas = self._store.replicas(trial_id=trial.trial_id)
        near = self._observer.near_epoch(trial.trial_id)
        blocked = self._blocked_since.pop(trial.trial_id, None)
        vacate = blocked is not None and now - blocked >= self._settings.move_patience_seconds
        for action in plan(
            trial, grant.placement, replicas, now, near_epoch=near, vacate=vacate, leaving=frozenset(self._leaving)
        ):
            if isinstance(action, Launch):
                if not self._launch(trial, grant, action.placement, now) and trial.members:
                    self._blocked_since[trial.trial_id] = now if blocked is None else blocked
            elif isinstance(action, Publish):
                self._publish(trial, grant, action, now)
            elif isinstance(action, Stop):
                self._stop(action, replicas, now)
            elif isinstance(action, RetryJoin):
                self._retry([each for each in replicas if each.replica_id in action.replica_ids])

    def _note_reason(self, trial: TrialRecord, grant: Grant, now: float) -> None:
        """Keep a waiting trial's reason current; changes of size are noted when they are acted on."""
        waits = trial.state in (TrialState.PENDING, TrialState.PAUSED) and grant.slots == 0
        if waits and grant.reason.sentence != trial.reason.sentence:
            self._store.save_trial(replace(self._store.trial(trial.trial_id), reason=grant.reason))
            self._note(trial.trial_id, "waits", grant.reason, now, who=f"policy {self._policy.name}")
            logger.info("trial waits trial=%s reason=%s", trial.trial_id, grant.reason.sentence)

    def _launch(self, trial: TrialRecord, grant: Grant, wanted: Mapping[str, int], now: float) -> int:
        """Start replicas where slots are free; returns how many could be started."""
        if now < self._launch_not_before.get(trial.trial_id, now):
            # The decision that is being carried out is older than what happened to the trial.
            return 0
        taken = {(replica.node, replica.slot) for replica in self._store.replicas()}
        nodes = {node.node: node for node in self._launcher.nodes()}
        started = 0
        index = self._next_launch_index(trial)
        for node, count in wanted.items():
            if node not in nodes:
                continue
            closed = nodes[node].in_use
            free = [slot for slot in range(nodes[node].slots) if (node, slot) not in taken and slot not in closed]
            started += sum(
                self._launch_one(trial, nodes[node], slot, index + started + offset, grant.slots, now)
                for offset, slot in enumerate(free[:count])
            )
        if not started:
            return 0
        trial = self._store.trial(trial.trial_id)
        if trial.state in (TrialState.PENDING, TrialState.PAUSED):
            self._move(trial, TrialEvent.LAUNCHED, grant.reason, now)
            return started
        after = len(self._store.replicas(trial_id=trial.trial_id))
        if trial.members and after > grant.slots:
            # It moves: some of those that train now leave when these have joined.
            self._moving.add(trial.trial_id)
        if trial.state is TrialState.RUNNING:
            self._note_rescale(trial, grant, len(trial.members), min(after, grant.slots), now)
        return started

    def _note_rescale(self, trial: TrialRecord, grant: Grant, before: int, after: int, now: float) -> None:
        self._store.save_trial(replace(trial, reason=grant.reason))
        who = "scheduler" if grant.reason.code == "replica_lost" else f"policy {self._policy.name}"
        what = f"{before} -> {after} replicas" if before != after else f"moves {after} replica{'s' * (after != 1)}"
        self._note(trial.trial_id, what, grant.reason, now, who=who)
        logger.info(
            "trial rescales trial=%s replicas=%d->%d reason=%s: %s",
            trial.trial_id,
            before,
            after,
            grant.reason.code,
            grant.reason.sentence,
        )

    def _next_launch_index(self, trial: TrialRecord) -> int:
        """0 for the first of a new set: until ranks are given out, that one speaks for the trial."""
        indices = [replica.launch_index for replica in self._store.replicas(trial_id=trial.trial_id)]
        return max(indices, default=-1) + 1

    def _launch_one(
        self, trial: TrialRecord, node: NodeSlots, slot: int, index: int, replicas: int, now: float
    ) -> bool:
        replica_id = f"{trial.trial_id}-{uuid.uuid4().hex[:8]}"
        record = ReplicaRecord(
            replica_id=replica_id,
            trial_id=trial.trial_id,
            node=node.node,
            slot=slot,
            launch_index=index,
            launched_at=now,
        )
        request = self._request(trial, record, node.kind, replicas)
        if not self._launcher.is_ready_for(request):
            self._note_prepared(trial)
            return False
        # The row comes first: a scheduler that dies in between leaves a row without a process, never the reverse.
        self._store.add_replica(record)
        try:
            process = self._launcher.launch(request)
        except LaunchFailed as error:
            self._note_not_started(record, error, now)
            return False
        if process is None:
            self._starting.add(replica_id)
        else:
            self._note_process(record, process)
        return True

    def _note_process(self, record: ReplicaRecord, process: ReplicaProcess) -> None:
        try:
            self._store.update_replica(record.replica_id, pid=process.pid, process_started=process.started)
        except StoreUnavailable:
            started = replace(record, pid=process.pid, process_started=process.started)
            self._launcher.stop(started, force=True)
            raise

    def _note_not_started(self, record: ReplicaRecord, error: LaunchFailed, now: float) -> None:
        logger.warning("launch failed trial=%s error=%s", record.trial_id, error)
        self._store.update_replica(record.replica_id, state=ReplicaState.GONE, gone_at=now)
        self._note_launch_failed(self._store.trial(record.trial_id), str(error), now)

    def _note_prepared(self, trial: TrialRecord) -> None:
        present = self._store.trial(trial.trial_id)
        reason = Reason(code="preparing", sentence="what its replicas have in common is being imported")
        if present.state is TrialState.PENDING and present.reason != reason:
            self._store.save_trial(replace(present, reason=reason))

    def _note_launch_failed(self, trial: TrialRecord, error: str, now: float) -> None:
        trains = bool(trial.members)
        self._launch_not_before[trial.trial_id] = now + (FAILED_JOIN_SECONDS if trains else LAUNCH_BACKOFF_SECONDS)
        reason = Reason(code="launch_failed", sentence=f"a replica could not be started: {error}")
        present = self._store.trial(trial.trial_id)
        if present.reason != reason:
            self._note(trial.trial_id, "warning", reason, now)
            self._store.save_trial(replace(present, reason=reason))

    def _request(self, trial: TrialRecord, replica: ReplicaRecord, node_kind: str, replicas: int) -> LaunchRequest:
        identity = ReplicaEnvironment(
            api_url=self._settings.api_url(),
            token=self._settings.replica_token(replica.replica_id),
            trial_id=trial.trial_id,
            replica_id=replica.replica_id,
            launch_index=replica.launch_index,
            checkpoint_dir=self._checkpoint_dir(trial),
            node=replica.node,
            slot=replica.slot,
            node_kind=node_kind,
            replicas=replicas,
            server_file=self._settings.server_file,
        )
        environ = {
            **self._settings.base_environ,
            **self._launcher.slot_environ(replica.node, replica.slot),
            **trial.spec.environ,
            **identity.to_environ(),
        }
        return LaunchRequest(
            replica_id=replica.replica_id,
            trial_id=trial.trial_id,
            study=trial.spec.study,
            node=replica.node,
            slot=replica.slot,
            entrypoint=trial.spec.entrypoint,
            environ=environ,
            working_dir=trial.spec.working_dir,
            python_path=trial.spec.python_path,
            preload=trial.spec.preload,
            user_code=trial.spec.user_code,
            log=self._log(replica),
            image=trial.spec.image,
            package=trial.spec.package,
            moved_to=trial.spec.moved_to,
        )

    def logs(self, trial_id: str) -> list[Path]:
        """Files with what a trial's replicas printed, oldest first. Callable from any thread."""
        for replica in self._store.replicas(trial_id=trial_id):
            self._launcher.collect_log(replica, self._log(replica))
        files = (self._settings.state_dir / "logs" / trial_id).glob("*.log")
        return sorted(files, key=lambda path: path.stat().st_mtime)

    def forget_trial(self, trial_id: str) -> None:
        """It ended long ago, and its store has forgotten it."""
        self.forget_logs(trial_id)
        self._observer.forget(trial_id)
        for noted in (self._launch_not_before, self._progress_at_loss):
            noted.pop(trial_id, None)
        for key in [key for key in self._failures if key[0] == trial_id]:
            del self._failures[key]

    def forget_logs(self, trial_id: str) -> None:
        """What the trial's replicas printed is not wanted any more."""
        shutil.rmtree(self._settings.state_dir / "logs" / trial_id, ignore_errors=True)

    def _log(self, replica: ReplicaRecord) -> Path:
        return self._settings.state_dir / "logs" / replica.trial_id / f"{replica.replica_id}.log"

    def _checkpoint_dir(self, trial: TrialRecord) -> Path:
        return self._settings.state_dir / "checkpoints" / trial.trial_id

    def _publish(self, trial: TrialRecord, grant: Grant, action: Publish, now: float) -> None:
        trial = self._store.trial(trial.trial_id)
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
        before = len(trial.members)
        if trial.members and len(action.members) < before:
            lost = before - sum(
                1 for replica in self._store.replicas(trial_id=trial.trial_id) if replica.replica_id in trial.members
            )
            reason = grant.reason
            leaving = len(self._leaving.intersection(trial.members))
            if leaving:
                sentence = f"{leaving} of {before} replicas was told to leave its node; the others go on"
                reason = Reason(code="replica_preempted", sentence=sentence)
            if lost:
                reason = Reason(code="replica_lost", sentence=f"{lost} of {before} replicas was lost; the others go on")
            if lost or leaving or trial.trial_id not in self._moving:
                self._note_rescale(
                    self._store.trial(trial.trial_id), replace(grant, reason=reason), before, len(action.members), now
                )
            self._moving.discard(trial.trial_id)
        logger.info(
            "generation published trial=%s generation=%d members=%d", trial.trial_id, number, len(action.members)
        )

    def _stop(self, action: Stop, replicas: Sequence[ReplicaRecord], now: float) -> None:
        for replica in replicas:
            if replica.replica_id == action.replica_id:
                self._store.update_replica(replica.replica_id, stop_requested_at=now)
                if action.force:
                    self._launcher.collect_log(replica, self._log(replica))
                self._launcher.stop(replica, force=action.force)

    def end_replica(self, replica: ReplicaRecord) -> None:
        """End a replica now; from the shutdown path, after its time to save is over."""
        self._launcher.stop(replica, force=True)

    def _retry(self, joiners: Sequence[ReplicaRecord]) -> None:
        for joiner in joiners:
            self._store.retry_join(joiner.replica_id, joiner.join_epoch)

    def _stop_leftovers(self, now: float) -> None:
        """Replicas of trials that are over; they get a moment to end by themselves."""
        replicas = self._store.replicas()
        if not replicas:
            return
        live = {trial.trial_id for trial in self._store.trials(live_only=True)}
        for trial_id in {replica.trial_id for replica in replicas} - live:
            trial = self._store.trial(trial_id)
            mine = [replica for replica in replicas if replica.trial_id == trial_id]
            if trial.outcome is not None and now - (trial.finished_at or now) < self._settings.leaving_seconds:
                continue
            for action in plan(trial, {}, mine, now):
                if isinstance(action, Stop):
                    self._stop(action, mine, now)


def _shown(value: object) -> object:
    """A returned value as people write it; numbers that JSON does not have come as text."""
    if isinstance(value, list):
        return ", ".join(str(_shown(item)) for item in value)
    return value["float"] if isinstance(value, dict) and "float" in value else value
