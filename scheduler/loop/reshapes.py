"""Reshapes: has trials go on with another layout out of what their processes have in memory (`trials.reshape`).

What is under way is known here alone. After a scheduler that has begun one, the next finds a trial that trains beside
joiners that it does not want, or one whose processes all stand at their first step without having trained, or a pause;
the first goes on, the others go on from the checkpoint that was written when their replicas ended.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from dist_core.layout import Layout
from dist_core.link.reshape import Reshape
from scheduler.loop.backoff import Backoff
from scheduler.loop.happenings import Happenings
from scheduler.loop.journal import Journal
from scheduler.loop.starts import Place, Starts
from scheduler.snapshot import Grant
from trials.launch.base import Launcher
from trials.record import ReplicaRecord, TrialRecord
from trials.reshape import Fail, Form, GiveUp, Offer, Over, Seat, Settle, next_step, seats
from trials.states import TrialState
from trials.store import TrialStore

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _UnderWay:
    reshape: Reshape
    before: tuple[str, ...]
    grant: Grant
    is_settled: bool = False


class Reshapes:
    """Trials are reshaped by the loop's thread; what is under way is read by any.

    ``patience_seconds``: longest wait for slots that others hold; then the trial gives up its own, with a pause.
    ``stop``: ends a process at once.
    """

    def __init__(
        self,
        store: TrialStore,
        launcher: Launcher,
        journal: Journal,
        backoff: Backoff,
        starts: Starts,
        happenings: Happenings,
        *,
        patience_seconds: float,
        stop: Callable[[ReplicaRecord, float], None],
    ) -> None:
        self._store = store
        self._launcher = launcher
        self._journal = journal
        self._backoff = backoff
        self._starts = starts
        self._happenings = happenings
        self._patience_seconds = patience_seconds
        self._stop = stop
        self._under_way: dict[str, _UnderWay] = {}
        self._refused: dict[str, str] = {}
        """By trial the layout that it could not come to without a pause."""
        self._pausing: set[str] = set()
        """Trials whose replicas have ended instead: a command that is a process of its own does not run again."""
        self._wanted_since: dict[str, tuple[str, float]] = {}
        """By trial the layout that it waits to be brought to, and since when."""

    def of(self, trial_id: str, number: int) -> Reshape | None:
        """The one for which this generation ends, if it does so for one."""
        known = self._under_way.get(trial_id)
        return known.reshape if known is not None and known.reshape.number == number else None

    def forget(self, trial_id: str) -> None:
        """The trial is over."""
        self._under_way.pop(trial_id, None)
        self._refused.pop(trial_id, None)
        self._wanted_since.pop(trial_id, None)
        self._pausing.discard(trial_id)

    # ------------------------------------------------------------------ beginning one

    def can_begin(self, trial: TrialRecord, grant: Grant, rows: Sequence[ReplicaRecord], now: float) -> bool:
        """Whether the trial may come to the layout it is granted as it trains, at once or when it is at rest again."""
        known = self._wanted_since.get(trial.trial_id)
        is_first_look = known is None or known[0] != grant.layout
        since = now if known is None or is_first_look else known[1]
        self._wanted_since[trial.trial_id] = grant.layout, since
        may_wait = is_first_look or now - since < self._patience_seconds
        trains = trial.state in (TrialState.RUNNING, TrialState.RESCALING) and bool(trial.members)
        refused = trial.trial_id in self._pausing or self._refused.get(trial.trial_id) == grant.layout
        return trains and may_wait and not refused and bool(self._seats(trial, grant, rows))

    def begin(self, trial: TrialRecord, grant: Grant, rows: Sequence[ReplicaRecord], now: float) -> bool:
        """False where it cannot be begun yet; ``rows``: all processes of the trial that are not gone."""
        rested = not trial.switching and {row.replica_id for row in rows} == set(trial.members)
        well = self._happenings.leaving.isdisjoint(trial.members)
        well = well and self._happenings.broken_since(trial.trial_id) is None
        if not rested or not well or self._backoff.holds(trial.trial_id, now):
            return False
        wanted = self._seats(trial, grant, rows)
        places = self._places([seat for replica in wanted for seat in replica if not seat.replica_id])
        if places is None:
            return False
        names = iter([f"{trial.trial_id}-{uuid.uuid4().hex[:8]}" for _ in places])
        reshape = Reshape(
            number=trial.generation + 1,
            layout=grant.layout,
            holders=trial.members[: trial.slots_per_replica],
            replicas=tuple(tuple(seat.replica_id or next(names) for seat in replica) for replica in wanted),
        )
        new = [name for name in reshape.processes if name not in trial.members]
        if not self._starts.start_for(trial, reshape, dict(zip(new, places, strict=True)), now):
            return False
        self._under_way[trial.trial_id] = _UnderWay(reshape, trial.members, grant)
        self._wanted_since.pop(trial.trial_id, None)
        return True

    def _seats(self, trial: TrialRecord, grant: Grant, rows: Sequence[ReplicaRecord]) -> tuple[tuple[Seat, ...], ...]:
        by_id = {row.replica_id: row for row in rows}
        members = [by_id[name] for name in trial.members if name in by_id]
        most = max((node.slots for node in self._launcher.nodes()), default=1)
        return seats(members, grant.placement, Layout.from_name(grant.layout).slots, most)

    def _places(self, new: Sequence[Seat]) -> list[Place] | None:
        """Free slots for all of them; None where there are too few."""
        nodes = {node.node: node for node in self._launcher.nodes()}
        taken = {(replica.node, replica.slot) for replica in self._store.replicas()}
        taken |= {(node.node, slot) for node in nodes.values() for slot in node.in_use}
        found = []
        for seat in new:
            node = nodes.get(seat.node)
            slots = range(0 if node is None else node.slots)
            slot = next((each for each in slots if (seat.node, each) not in taken), None)
            if node is None or slot is None:
                return None
            taken.add((seat.node, slot))
            found.append(Place(node, slot))
        return found

    # ------------------------------------------------------------------ carrying it on

    def carry_on(self, trial: TrialRecord, grant: Grant, rows: Sequence[ReplicaRecord], now: float) -> bool:
        """Do what comes next for the trial; False where none is under way."""
        known = self._under_way.get(trial.trial_id)
        if known is None:
            return False
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
        )
        if isinstance(step, Offer):
            self._journal.note_reshape(trial, known.reshape, known.grant, now)
            self._publish(trial, (), now)
        elif isinstance(step, Settle):
            self._settle(trial, known, rows)
        elif isinstance(step, Form):
            self._publish(trial, known.reshape.processes, now)
        elif isinstance(step, GiveUp):
            self._give_up(trial, known, step, rows, now)
        elif isinstance(step, Fail):
            self._fail(trial, known, step, rows, now)
        elif isinstance(step, Over):
            self._under_way.pop(trial.trial_id, None)
            return False
        return True

    def _publish(self, trial: TrialRecord, members: tuple[str, ...], now: float) -> None:
        self._happenings.note_whole(trial.trial_id)
        present = self._store.trial(trial.trial_id)
        number = max(present.generation, present.published) + 1
        self._store.save_trial(
            replace(present, published=number, published_members=members, published_at=now, join_epoch=None)
        )
        logger.info("generation published trial=%s generation=%d members=%d", trial.trial_id, number, len(members))

    def _settle(self, trial: TrialRecord, known: _UnderWay, rows: Sequence[ReplicaRecord]) -> None:
        for row in rows:
            if row.replica_id in known.reshape.processes:
                index = known.reshape.processes.index(row.replica_id)
                if row.launch_index != index:
                    self._store.update_replica(row.replica_id, launch_index=index)
        present = self._store.trial(trial.trial_id)
        self._store.save_trial(replace(present, layout=known.reshape.layout))
        self._under_way[trial.trial_id] = replace(known, is_settled=True)
        self._refused.pop(trial.trial_id, None)

    def _give_up(
        self, trial: TrialRecord, known: _UnderWay, step: GiveUp, rows: Sequence[ReplicaRecord], now: float
    ) -> None:
        del self._under_way[trial.trial_id]
        if step.has_ended:
            self._pausing.add(trial.trial_id)
        if step.why:
            self._refused[trial.trial_id] = known.reshape.layout
            sentence = f"it cannot go on as {known.reshape.layout} without a pause: {step.why}"
            self._journal.warn(trial.trial_id, "not_reshaped", sentence, now)
        for row in rows:
            if row.replica_id not in known.before:
                self._stop(row, now)
        if step.members:
            self._publish(trial, step.members, now)

    def _fail(
        self, trial: TrialRecord, known: _UnderWay, step: Fail, rows: Sequence[ReplicaRecord], now: float
    ) -> None:
        del self._under_way[trial.trial_id]
        sentence = f"it did not come to train as {known.reshape.layout}: {step.why}; it goes on from its checkpoint"
        self._journal.warn(trial.trial_id, "not_reshaped", sentence, now)
        for row in rows:
            self._stop(row, now)
