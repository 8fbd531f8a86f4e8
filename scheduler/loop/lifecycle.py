"""Lifecycle: moves each trial along its transition table by what is known of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from dist_core.errors import EXIT_PREEMPTED
from scheduler.knowledge.observer import Observer
from scheduler.loop.backoff import FAILED_JOIN_SECONDS, Backoff
from scheduler.loop.journal import Journal
from scheduler.loop.losses import BACKOFF_SECONDS, LONGEST_BACKOFF_SECONDS, Verdict, found_no_room, judge
from scheduler.loop.observations import Observations
from scheduler.loop.trial_files import TrialFiles
from trials.launch.base import NO_ROOM
from trials.record import Outcome, Reason, ReplicaRecord, ReplicaState, TrialRecord
from trials.states import TrialEvent, TrialState, next_state
from trials.store import TrialStore


def next_event(trial: TrialRecord, replicas: Sequence[ReplicaRecord], *, reports: bool) -> TrialEvent | None:
    """Return what has become of a live trial that has replicas, or waits; None if nothing has.

    ``reports``: it has reported, although no generation formed: code that does not use the adaptive core.
    """
    joins = bool(trial.members) and any(replica.replica_id not in trial.members for replica in replicas)
    if trial.state in (TrialState.PENDING, TrialState.PAUSED) and replicas:
        # A scheduler died between launching and noting it.
        return TrialEvent.LAUNCHED
    if trial.state is TrialState.STARTING and (trial.members or (trial.published == 0 and reports)):
        return TrialEvent.TRAINS
    if trial.state is TrialState.RUNNING and (trial.switching or joins):
        return TrialEvent.RESCALE_BEGAN
    if trial.state is TrialState.RESCALING and not trial.switching and not joins:
        return TrialEvent.RESCALE_ENDED
    return None


class Lifecycle:
    """Moves each trial along its table of states.

    ``on_end``: told of each trial that is over.
    """

    def __init__(
        self,
        store: TrialStore,
        journal: Journal,
        backoff: Backoff,
        files: TrialFiles,
        observations: Observations,
        observer: Observer,
        *,
        on_end: Callable[[str], None],
    ) -> None:
        self._store = store
        self._journal = journal
        self._backoff = backoff
        self._files = files
        self._observations = observations
        self._observer = observer
        self._on_end = on_end
        self._progress_at_loss: dict[str, float] = {}
        self._refusals: dict[str, int] = {}
        """Times in a row that a trial's replicas have left before they could train."""

    def advance(self, trial: TrialRecord, now: float) -> None:
        trial = self._settle_switch(trial, now)
        replicas = self._store.replicas(trial_id=trial.trial_id)
        event = next_event(trial, replicas, reports=False)
        if event is TrialEvent.LAUNCHED:
            self._journal.move(trial, event, trial.reason, now)
            trial = self._store.trial(trial.trial_id)
        if trial.outcome is not None and trial.state is not TrialState.PENDING:
            self.finish(trial, *_end_of(trial.outcome), now)
        elif trial.cancel_requested is not None:
            reason = Reason(code="cancelled", sentence=trial.cancel_requested)
            self.finish(trial, TrialEvent.CANCELLED_BY_OWNER, reason, now)
        elif trial.state.holds_slots and not replicas:
            self._empty(trial, now)
        else:
            starts = trial.state is TrialState.STARTING
            event = next_event(trial, replicas, reports=starts and self._store.has_reported(trial.trial_id))
            if event is TrialEvent.TRAINS:
                self._journal.move(trial, event, Reason(code="trains", sentence="its first replicas are training"), now)
            elif event is not None:
                self._journal.move(trial, event, trial.reason, now)

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
            for replica in self._store.replicas(trial_id=trial.trial_id):
                if replica.replica_id not in trial.members and replica.join_epoch == trial.join_epoch:
                    self._store.retry_join(replica.replica_id, replica.join_epoch)
        else:
            return trial
        self._store.save_trial(settled)
        return settled

    # ------------------------------------------------------------------ where it ends

    def finish(self, trial: TrialRecord, event: TrialEvent, reason: Reason, now: float) -> None:
        self._journal.move(trial, event, reason, now, finished_at=now)
        self._observer.note_end(trial, next_state(trial.state, event))
        self._observations.forget(trial.trial_id)
        self._backoff.forget(trial.trial_id)
        self.forget(trial.trial_id)
        self._files.settle(trial, next_state(trial.state, event))
        self._on_end(trial.trial_id)

    def forget(self, trial_id: str) -> None:
        self._progress_at_loss.pop(trial_id, None)
        self._refusals.pop(trial_id, None)

    # ------------------------------------------------------------------ where all its replicas are gone

    def _empty(self, trial: TrialRecord, now: float) -> None:
        """Take a trial without replicas and without an outcome as paused, if that was asked, or as lost."""
        last = self._store.replicas(trial_id=trial.trial_id, live_only=False)
        ended = last[-max(1, len(trial.members)) :]
        statuses = {replica.exit_status for replica in ended}
        asked = trial.switching and not trial.published_members
        preempted = statuses <= {EXIT_PREEMPTED} or all(each.stop_requested_at is not None for each in ended)
        losses = trial.losses
        ends = self._observations.take_ends(ended)
        why = next((each.why for each in ends.values() if each is not None), "")
        if any(each is not None and each.code == "out_of_memory" for each in ends.values()):
            self._observer.give_up_layout(trial)
        if trial.layout and not asked and preempted:
            never_ready = all(each.ready_at is None and each.stop_requested_at is None for each in ended)
            self._note_refusal(trial.trial_id, now, again=never_ready)
        if asked or preempted:
            reason = Reason(code="paused", sentence=trial.hold or "saved its state and gave its slots back")
        elif found_no_room(ended, ends):
            # Nothing of its own went wrong.
            self._backoff.begin(trial.trial_id, now, FAILED_JOIN_SECONDS)
            reason = Reason(code=NO_ROOM, sentence=f"tries again in {FAILED_JOIN_SECONDS:.0f} s: {why}")
        else:
            verdict = self._judged(trial, ended, why)
            if verdict.gives_up:
                self.finish(trial, TrialEvent.GAVE_UP, verdict.reason, now)
                return
            losses, reason = verdict.losses, verdict.reason
            self._backoff.begin(trial.trial_id, now, verdict.wait_seconds)
        number = max(trial.generation, trial.published)
        self._journal.move(
            trial,
            TrialEvent.EMPTIED,
            reason,
            now,
            losses=losses,
            members=(),
            generation=number,
            published=number,
            published_members=(),
        )

    def _note_refusal(self, trial_id: str, now: float, *, again: bool) -> None:
        """Note a refusal: replicas that leave again and again before they can train would go on so."""
        number = self._refusals[trial_id] = self._refusals.get(trial_id, 0) + 1 if again else 0
        if number > 1:
            self._backoff.begin(trial_id, now, min(LONGEST_BACKOFF_SECONDS, BACKOFF_SECONDS * 2.0 ** (number - 1)))

    def _judged(self, trial: TrialRecord, ended: Sequence[ReplicaRecord], why: str) -> Verdict:
        return judge(
            {replica.exit_status for replica in ended},
            next((words for row in reversed(ended) if (words := self._files.last_words(row))), ""),
            why,
            losses=trial.losses,
            max_losses=trial.spec.max_losses,
            progressed=self._got_on(trial),
        )

    def _got_on(self, trial: TrialRecord) -> bool:
        """Tell whether the trial has made progress since its replicas were last lost."""
        progress = self._observer.progress(trial.trial_id)
        before = self._progress_at_loss.get(trial.trial_id)
        self._progress_at_loss[trial.trial_id] = max(progress, before or 0.0)
        return progress > (0.0 if before is None else before)


def _end_of(outcome: Outcome) -> tuple[TrialEvent, Reason]:
    if outcome.kind == "value":
        return TrialEvent.VALUE_RETURNED, Reason(code="finished", sentence=f"returned {_shown(outcome.value)}")
    if outcome.kind == "pruned":
        return TrialEvent.PRUNED_BY_TUNER, Reason(code="pruned", sentence=outcome.message or "pruned")
    sentence = f"{outcome.error_type}: {outcome.message}"
    return TrialEvent.GAVE_UP, Reason(code="user_exception", sentence=sentence)


def _shown(value: object) -> object:
    """Return a returned value as people write it; numbers that JSON does not have come as text."""
    if isinstance(value, list):
        return ", ".join(str(_shown(item)) for item in value)
    return value["float"] if isinstance(value, dict) and "float" in value else value
