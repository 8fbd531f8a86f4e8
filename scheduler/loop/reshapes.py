"""Reshapes: has trials go on with another layout out of what their processes have in memory (`trials.reshape`).

What is under way is known here alone. After a scheduler that has begun one, the next finds a trial that trains beside
joiners that it does not want, one that it takes to be pausing, or one without members whose processes have not ended:
these it ends, and the trial goes on from the checkpoint that was written when its replicas ended.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from dist_core.layout import Layout
from dist_core.link.reshape import Reshape
from scheduler.loop.backoff import Backoff
from scheduler.loop.happenings import Happenings
from scheduler.loop.journal import Journal
from scheduler.loop.starts import Place, Starts, new_ids
from scheduler.snapshot import Grant
from trials.plan import STOP_GRACE_SECONDS
from trials.record import ReplicaRecord, ReplicaState, TrialRecord
from trials.reshape import Fail, Form, GiveUp, Offer, Over, Seat, Settle, next_step, seats
from trials.states import TrialState
from trials.store import TrialStore

logger = logging.getLogger(__name__)


class Publish(Protocol):
    def __call__(self, trial_id: str, members: tuple[str, ...], now: float) -> None: ...


class Stop(Protocol):
    def __call__(self, replica: ReplicaRecord, now: float, *, force: bool) -> None: ...


@dataclass(frozen=True, slots=True)
class _UnderWay:
    reshape: Reshape
    before: tuple[str, ...]
    """The trial's members when it began, by rank."""
    grant: Grant
    is_settled: bool = False
    is_given_up: bool = False
    """After it was offered: the replicas may have ended for it all the same."""
    has_failed: bool = False
    """All that is left of the trial is to end."""


class Reshapes:
    """Trials are reshaped by the loop's thread; what is offered is read by any.

    ``patience_seconds``: longest wait for slots that others hold; then the trial gives up its own, with a pause.
    """

    def __init__(
        self,
        store: TrialStore,
        journal: Journal,
        backoff: Backoff,
        starts: Starts,
        happenings: Happenings,
        *,
        patience_seconds: float,
        publish: Publish,
        stop: Stop,
    ) -> None:
        self._store = store
        self._journal = journal
        self._backoff = backoff
        self._starts = starts
        self._happenings = happenings
        self._patience_seconds = patience_seconds
        self._publish = publish
        self._stop = stop
        self._under_way: dict[str, _UnderWay] = {}
        self._offered: dict[str, Reshape] = {}
        """By trial the latest: whoever asks late has to hear the same."""
        self._refused: dict[str, str] = {}
        """By trial the layout that it could not come to without a pause."""
        self._pausing: set[str] = set()
        """Trials whose replicas have ended instead: a command that is a process of its own does not run again."""
        self._wanted_since: dict[str, tuple[str, float]] = {}
        """By trial the layout that it waits to be brought to, and since when."""

    def of(self, trial_id: str, number: int) -> Reshape | None:
        """The one for which this generation ends, if it does so for one."""
        known = self._offered.get(trial_id)
        return known if known is not None and known.number == number else None

    def forget(self, trial_id: str) -> None:
        """The trial is over."""
        self._under_way.pop(trial_id, None)
        self._offered.pop(trial_id, None)
        self._pausing.discard(trial_id)
        self.forget_wish(trial_id)

    def forget_wish(self, trial_id: str) -> None:
        """The trial has the layout that it is to have."""
        self._wanted_since.pop(trial_id, None)
        self._refused.pop(trial_id, None)

    # ------------------------------------------------------------------ beginning one

    def can_begin(self, trial: TrialRecord, grant: Grant, rows: Sequence[ReplicaRecord], now: float) -> bool:
        """Whether the trial may come to the layout it is granted as it trains, at once or when it is at rest again."""
        trains = trial.state in (TrialState.RUNNING, TrialState.RESCALING) and bool(trial.members)
        refused = trial.trial_id in self._pausing or self._refused.get(trial.trial_id) == grant.layout
        if not trains or refused or not self._seats(trial, grant, rows):
            return False
        layout, since = self._wanted_since.get(trial.trial_id, ("", now))
        if layout != grant.layout:
            self._wanted_since[trial.trial_id] = grant.layout, now
            return True
        return now - since < self._patience_seconds

    def begin(self, trial: TrialRecord, grant: Grant, rows: Sequence[ReplicaRecord], index: int, now: float) -> bool:
        """False where it cannot be begun yet; ``rows``: all processes of the trial that are not gone.

        ``index``: that a further process of the trial may have (`Starts.start_for`).
        """
        rested = not trial.switching and {row.replica_id for row in rows} == set(trial.members)
        well = self._happenings.leaving.isdisjoint(trial.members)
        well = well and self._happenings.broken_since(trial.trial_id) is None
        if not rested or not well or self._backoff.holds(trial.trial_id, now):
            return False
        wanted = self._seats(trial, grant, rows)
        places = self._places([seat for replica in wanted for seat in replica if not seat.replica_id])
        if places is None:
            return False
        new = new_ids(trial, len(places))
        names = iter(new)
        reshape = Reshape(
            number=trial.generation + 1,
            layout=grant.layout,
            holders=trial.members[: trial.slots_per_replica],
            replicas=tuple(tuple(seat.replica_id or next(names) for seat in replica) for replica in wanted),
        )
        if not self._starts.start_for(trial, reshape, dict(zip(new, places, strict=True)), index, now):
            return False
        self._under_way[trial.trial_id] = _UnderWay(reshape, trial.members, grant)
        return True

    def _seats(self, trial: TrialRecord, grant: Grant, rows: Sequence[ReplicaRecord]) -> tuple[tuple[Seat, ...], ...]:
        by_id = {row.replica_id: row for row in rows}
        members = [by_id[name] for name in trial.members if name in by_id]
        return seats(members, grant.placement, Layout.from_name(grant.layout).slots, self._starts.most_on_a_node)

    def _places(self, new: Sequence[Seat]) -> list[Place] | None:
        """Free slots for all of them; None where there are too few."""
        free = self._starts.free_places()
        if any(len(free.get(node, [])) < count for node, count in Counter(seat.node for seat in new).items()):
            return None
        return [free[seat.node].pop(0) for seat in new]

    # ------------------------------------------------------------------ carrying it on

    def carry_on(self, trial: TrialRecord, grant: Grant, rows: Sequence[ReplicaRecord], now: float) -> bool:
        """Do what comes next for the trial; False where none is under way."""
        known = self._under_way.get(trial.trial_id)
        if known is None:
            if trial.state is not TrialState.RESCALING or trial.members or not rows:
                return False
            # Of a scheduler before this one.
            self._end(rows, (), now)
            return True
        if trial.state not in (TrialState.RUNNING, TrialState.RESCALING):
            # All its processes have ended, however that came.
            del self._under_way[trial.trial_id]
            if not known.is_settled and self._departed(trial, known) >= set(known.before):
                self._pausing.add(trial.trial_id)
            return False
        if known.is_given_up:
            return self._look_back(trial, known, rows, now)
        if known.has_failed:
            self._end(rows, known.reshape.holders, now)
            return True
        step = next_step(
            trial,
            known.reshape,
            rows,
            now,
            before=known.before,
            is_wanted=(grant.layout, grant.placement) == (known.grant.layout, known.grant.placement),
            is_settled=known.is_settled,
            leaving=self._happenings.leaving,
            broken_since=self._happenings.broken_since(trial.trial_id),
            departed=self._departed(trial, known),
        )
        if isinstance(step, Offer):
            self._journal.note_reshape(trial, known.reshape, known.grant, now)
            self._offered[trial.trial_id] = known.reshape
            self._publish(trial.trial_id, (), now)
        elif isinstance(step, Settle):
            self._settle(trial, known, rows)
        elif isinstance(step, Form):
            self._publish(trial.trial_id, known.reshape.processes, now)
        elif isinstance(step, GiveUp):
            self._give_up(trial, known, step, rows, now)
        elif isinstance(step, Fail):
            self._fail(trial, known, step.why, rows, now)
        elif isinstance(step, Over):
            del self._under_way[trial.trial_id]
            return False
        return True

    def _departed(self, trial: TrialRecord, known: _UnderWay) -> frozenset[str]:
        """Members that have ended by themselves and without an error."""
        rows = self._store.replicas(trial_id=trial.trial_id, live_only=False)
        return frozenset(row.replica_id for row in rows if row.replica_id in known.before and row.exit_status == 0)

    def _settle(self, trial: TrialRecord, known: _UnderWay, rows: Sequence[ReplicaRecord]) -> None:
        # Replicas go by these numbers; whoever leaves has none among them.
        order = [*known.reshape.processes, *(name for name in known.before if name not in known.reshape.processes)]
        for row in rows:
            if row.replica_id in order and row.launch_index != order.index(row.replica_id):
                self._store.update_replica(row.replica_id, launch_index=order.index(row.replica_id))
        present = self._store.trial(trial.trial_id)
        self._store.save_trial(replace(present, layout=known.reshape.layout))
        self._note_layout(trial.trial_id, known.reshape.layout)
        self._under_way[trial.trial_id] = replace(known, is_settled=True)

    def _note_layout(self, trial_id: str, layout: str) -> None:
        """What its replicas have said of their layout is past, until those that train with this one say theirs."""
        hints = self._store.hints([trial_id]).get(trial_id)
        if hints is not None and hints.get("layout"):
            size = Layout.from_name(layout).slots_per_share
            self._store.put_hints(trial_id, {**hints, "layout": layout, "slots_per_share": size})

    # ------------------------------------------------------------------ where it comes to nothing

    def _give_up(
        self, trial: TrialRecord, known: _UnderWay, step: GiveUp, rows: Sequence[ReplicaRecord], now: float
    ) -> None:
        if step.members:
            self._publish(trial.trial_id, step.members, now)
            self._under_way[trial.trial_id] = replace(known, is_given_up=True)
        else:
            del self._under_way[trial.trial_id]
        if step.has_paused:
            self._pausing.add(trial.trial_id)
        if step.why:
            self._refused[trial.trial_id] = known.reshape.layout
            sentence = f"it cannot go on as {known.reshape.layout} without a pause: {step.why}"
            self._journal.warn(trial.trial_id, "not_reshaped", sentence, now)
        for row in rows:
            if row.replica_id not in known.before:
                self._stop(row, now, force=True)

    def _look_back(self, trial: TrialRecord, known: _UnderWay, rows: Sequence[ReplicaRecord], now: float) -> bool:
        """Whether its replicas had ended when they were told to train on: the word of it comes late, or never."""
        stands = any(row.replica_id in known.before and row.state is ReplicaState.READY for row in rows)
        if trial.generation < known.reshape.number and (trial.entered == known.reshape.number or stands):
            self._fail(trial, known, "one of its processes was lost at that moment", rows, now)
            return True
        if not trial.switching:
            del self._under_way[trial.trial_id]
        return False

    def _fail(self, trial: TrialRecord, known: _UnderWay, why: str, rows: Sequence[ReplicaRecord], now: float) -> None:
        self._refused[trial.trial_id] = known.reshape.layout
        self._under_way[trial.trial_id] = replace(known, is_given_up=False, has_failed=True)
        sentence = f"it did not come to train as {known.reshape.layout}: {why}; it goes on from its checkpoint"
        self._journal.warn(trial.trial_id, "not_reshaped", sentence, now)
        self._end(rows, known.reshape.holders, now)

    def _end(self, rows: Sequence[ReplicaRecord], holders: Sequence[str], now: float) -> None:
        """All of them: those that may still write the trial's checkpoint with time for that, the others at once."""
        for row in rows:
            if row.stop_requested_at is None:
                self._stop(row, now, force=bool(holders) and row.replica_id not in holders)
            elif now - row.stop_requested_at > STOP_GRACE_SECONDS:
                self._stop(row, now, force=True)
