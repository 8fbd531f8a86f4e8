"""Plan for one trial, from what should be to what to do next: a pure function, safe to call again and again.

Each call looks at the replicas as they are and returns the actions that move the trial towards the wanted number of
them on each node. Actions that are under way show in the observation (launched replicas, a published generation), so
calling twice does nothing twice.

A trial moves to another node by growing there first and leaving the old one then, without a stop. Where the new slots
are held by others, who may be waiting for this trial's, it leaves first (``vacate``), if need be by a pause.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass

from dist_core.link.environment import GRACE_SECONDS
from trials.record import ReplicaRecord, ReplicaState, TrialRecord

CONTACT_DEADLINE_SECONDS = 90.0
"""Seconds within which a started process must call the scheduler before it is replaced."""
JOIN_DEADLINE_SECONDS = 600.0
"""A joiner that has not reached its first training step by then is given up; the trial goes on without it."""
SWITCH_DEADLINE_SECONDS = 60.0
"""A published generation that nobody entered by then is replaced by one of those who train now."""
PAUSE_DEADLINE_SECONDS = 310.0
"""Longest time that replicas take to save and leave; those that are not saving end themselves long before."""
LEFT_DEADLINE_SECONDS = 5.0
"""A replica that the trial goes on without ends by itself: others may still need its part of the last step with it."""
BROKEN_PATIENCE_SECONDS = 1.0
"""Why a collective failed shows within that time, as a replica that is gone; else the same replicas meet anew."""
DONE_PATIENCE_SECONDS = 10.0
"""A replica that has come to its end is followed by what its trial says of its own within that time."""
STOP_GRACE_SECONDS = GRACE_SECONDS
"""Between a polite and a forcible end; longer than what a replica itself allows for its last checkpoint."""


@dataclass(frozen=True, slots=True)
class Launch:
    """Start replicas on this many further slots of each node."""

    placement: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Publish:
    """Offer the next generation: these replicas, in rank order. No members: save and pause."""

    members: tuple[str, ...]
    join_epoch: int | None


@dataclass(frozen=True, slots=True)
class Stop:
    """End a replica; ``force`` without waiting for it to save anything."""

    replica_id: str
    force: bool


@dataclass(frozen=True, slots=True)
class RetryJoin:
    """The survivors passed the epoch these joiners had aimed at: have them aim again."""

    replica_ids: tuple[str, ...]


Action = Launch | Publish | Stop | RetryJoin


@dataclass(frozen=True, slots=True, kw_only=True)
class Circumstances:
    """Facts about a trial beside its records."""

    near_epoch: int | None = None
    """Latest epoch that the trial will be in soon; joiners that stand in a later one are let in later, so that an offer
    is not open for hours. None when nothing is known."""
    vacate: bool = False
    """The slots to move to have been held by others for too long."""
    leaving: Set[str] = frozenset()
    """Processes that somebody outside is about to end."""
    broken_since: float | None = None
    """Time at which one of them said that a collective failed, if they have not gone on since."""
    done: Set[str] = frozenset()
    """Processes that have lately ended by themselves and without an error; the trial is about to."""
    torn_for_good: Set[str] = frozenset()
    """Processes whose replica has lacked another one for so long that they have not ended by themselves."""


def plan(
    trial: TrialRecord,
    wanted: Mapping[str, int],
    rows: Sequence[ReplicaRecord],
    now: float,
    circumstances: Circumstances = Circumstances(),
) -> list[Action]:
    """Actions for a trial that should have ``wanted`` slots by node; ``rows`` are its processes that are not gone."""
    if trial.state.is_final:
        # Nothing is left to save.
        return [_stop(row, force=True) for row in rows if _may_stop(row, now)]
    stops: list[Action] = []
    if trial.members:
        left = [row for row in rows if _has_left(row, trial)]
        overdue = now - (trial.rescaled_at or 0.0) > LEFT_DEADLINE_SECONDS
        stops += [_stop(row, force=True) for row in left if overdue and _may_stop(row, now)]
        rows = [row for row in rows if row not in left]
        if left and not any(row.replica_id in trial.members for row in rows):
            # Nobody trains any more: what comes of the trial is judged when all its replicas are gone.
            return stops
    replicas, torn = whole_replicas(rows, trial.slots_per_replica)
    if trial.switching and not trial.published_members and any(row.replica_id in trial.members for row in rows):
        # On its way to a pause. Whoever leaves first is not lost; whoever does not leave in time is ended.
        overdue = now - trial.published_at > PAUSE_DEADLINE_SECONDS
        late = [row for row in rows if overdue or row.replica_id in circumstances.torn_for_good]
        return [*stops, *(_stop(row, force=True) for row in late if _may_stop(row, now))]
    if torn:
        stops += [
            _stop(row, force=True)
            for row in torn
            if row.replica_id in circumstances.torn_for_good and _may_stop(row, now)
        ]
        if not any(replica.ids[0] in trial.members for replica in replicas) and (trial.members or not replicas):
            return stops
    return [*stops, *_plan_live(trial, wanted, replicas, now, circumstances)]


def _has_left(row: ReplicaRecord, trial: TrialRecord) -> bool:
    """Tell whether a replica was a member of a generation that trained, and is none of the present one."""
    return row.state is ReplicaState.ACTIVE and row.replica_id not in trial.members


def _plan_live(
    trial: TrialRecord,
    wanted: Mapping[str, int],
    replicas: Sequence[Replica],
    now: float,
    circumstances: Circumstances,
) -> list[Action]:
    """Plan for a live trial, without the replicas that have left."""
    alive = {name: replica for replica in replicas for name in replica.ids}
    members = [name for name in trial.members if name in alive]
    if not trial.members or not members:
        return _plan_start(trial, wanted, replicas, now)
    if len(members) < len(trial.members) and not _published_only(trial, members):
        if set(trial.members) - set(members) <= circumstances.done and circumstances.broken_since is None:
            return []
        return [Publish(tuple(members), None)]
    training = list({alive[name].ids: alive[name] for name in members}.values())
    joiners = [replica for replica in replicas if replica not in training]
    if trial.switching:
        return _plan_switch(trial, members, joiners, now, circumstances.broken_since)
    staying = _names(replica for replica in training if circumstances.leaving.isdisjoint(replica.ids))
    if len(staying) < len(members) or _is_over(circumstances.broken_since, now):
        return [Publish(staying, None)]
    if not any(wanted.values()):
        return [Publish((), None), *_ended(joiners)]
    kept, room = _fitting(training, wanted)
    by_age = sorted(joiners, key=lambda joiner: joiner.launched_at)
    in_place, missing = _fitting(by_age, room)
    leaves = len(kept) < len(training)
    # Those who have not joined yet are the cheapest to give up.
    stops = _ended(joiner for joiner in by_age if joiner not in in_place)
    remaining = _names(kept)
    if leaves and not in_place and not missing:
        return [*stops, Publish(remaining, None)]
    if stops:
        return stops
    late = [joiner for joiner in joiners if _is_late(joiner, now)]
    if late:
        return _ended(late)
    if missing and leaves and circumstances.vacate:
        return [Publish(remaining, None), *([] if kept else _ended(joiners))]
    if missing:
        return [Launch(missing)]
    if joiners and all(joiner.state is ReplicaState.READY for joiner in joiners):
        return _plan_join(members, joiners, circumstances.near_epoch)
    return []


def _names(replicas: Iterable[Replica]) -> tuple[str, ...]:
    return tuple(name for replica in replicas for name in replica.ids)


def _processes(replicas: Iterable[Replica]) -> Iterator[ReplicaRecord]:
    for replica in replicas:
        yield from replica.processes


def _ended(replicas: Iterable[Replica]) -> list[Action]:
    return [Stop(name, force=True) for name in _names(replicas)]


def _fitting(replicas: Sequence[Replica], wanted: Mapping[str, int]) -> tuple[list[Replica], dict[str, int]]:
    """Return the replicas that are where they are wanted, first come first, and the slots wanted beyond them."""
    room = {node: count for node, count in wanted.items() if count > 0}
    fitting = []
    for replica in replicas:
        if all(room.get(node, 0) >= count for node, count in replica.nodes.items()):
            fitting.append(replica)
            for node, count in replica.nodes.items():
                room[node] -= count
    return fitting, {node: count for node, count in room.items() if count > 0}


def _plan_start(trial: TrialRecord, wanted: Mapping[str, int], replicas: Sequence[Replica], now: float) -> list[Action]:
    """No generation trains: launch a first set and let it in when all of it is ready."""
    stale = [replica for replica in replicas if _is_silent(replica, now)]
    if stale:
        return _ended(stale)
    if not any(wanted.values()):
        return [_stop(row, force=False) for row in _processes(replicas) if _may_stop(row, now)]
    ordered = sorted(replicas, key=lambda replica: replica.launch_index)
    in_place, missing = _fitting(ordered, wanted)
    if not replicas:
        return [Launch(missing)]
    if any(replica.join_epochs != {None} for replica in replicas):
        # Joiners of a generation that is lost: they hold no state worth keeping and expect survivors.
        return _ended(replicas)
    if len(in_place) < len(replicas):
        return _ended(replica for replica in ordered if replica not in in_place)
    if trial.switching:
        overdue = now - trial.published_at > SWITCH_DEADLINE_SECONDS
        gone = set(trial.published_members) - set(_names(replicas))
        if not overdue and not gone:
            return []
    # Those that are ready wait for the least number, and not for more: others may have to wait for their start.
    too_few = len(replicas) < trial.spec.min_replicas
    if missing and (too_few or all(replica.state is ReplicaState.LAUNCHED for replica in replicas)):
        return [Launch(missing)]
    if all(replica.state is ReplicaState.READY for replica in replicas):
        return [Publish(_names(ordered), None)]
    return []


def _is_over(broken_since: float | None, now: float) -> bool:
    """Tell whether replicas have waited for one another for longer than it takes to see that one of them is gone."""
    return broken_since is not None and now - broken_since > BROKEN_PATIENCE_SECONDS


def _plan_switch(
    trial: TrialRecord,
    members: Sequence[str],
    joiners: Sequence[Replica],
    now: float,
    broken_since: float | None,
) -> list[Action]:
    """Plan for a generation on offer: wait until it is entered, or replace it when somebody in it is gone or late.

    Or when they have failed to meet in it, which they say after it was made.
    """
    alive = {*members, *_names(joiners)}
    # A joiner may have given up an earlier offer, and aimed at a later epoch, just when this one was made.
    elsewhere = any(
        joiner.ids[0] in trial.published_members and joiner.join_epochs != {trial.join_epoch} for joiner in joiners
    )
    late = now - trial.published_at > SWITCH_DEADLINE_SECONDS
    failed = _is_over(broken_since, now) and _is_over(trial.published_at, now)
    if elsewhere or late or failed or set(trial.published_members) - alive:
        return [Publish(tuple(members), None)]
    return []


def _plan_join(members: Sequence[str], joiners: Sequence[Replica], near_epoch: int | None) -> list[Action]:
    """Plan to let joiners in: all are ready, and they can enter together only if they wait in the same epoch."""
    latest = max((epoch for each in joiners for epoch in each.join_epochs if epoch is not None), default=None)
    behind = _names(joiner for joiner in joiners if joiner.join_epochs != {latest})
    if behind:
        return [RetryJoin(behind)]
    if near_epoch is not None and latest is not None and latest > near_epoch:
        return []
    return [Publish((*members, *_names(sorted(joiners, key=lambda joiner: joiner.launch_index))), latest)]


def _published_only(trial: TrialRecord, members: Sequence[str]) -> bool:
    """Tell whether the generation on offer is one of survivors alone: who is gone was to leave it anyway."""
    return trial.switching and set(trial.published_members) <= set(members)


def _is_silent(replica: Replica, now: float) -> bool:
    return any(
        each.contact_at is None and now - each.launched_at > CONTACT_DEADLINE_SECONDS for each in replica.processes
    )


def _is_late(joiner: Replica, now: float) -> bool:
    unready = joiner.state is ReplicaState.LAUNCHED and now - joiner.launched_at > JOIN_DEADLINE_SECONDS
    return unready or _is_silent(joiner, now)


def _may_stop(row: ReplicaRecord, now: float) -> bool:
    """Tell whether to stop a replica: it was not asked yet, or long enough ago to insist."""
    return row.stop_requested_at is None or now - row.stop_requested_at > STOP_GRACE_SECONDS


def _stop(row: ReplicaRecord, *, force: bool) -> Action:
    insist = row.stop_requested_at is not None
    return Stop(row.replica_id, force=force or insist)


@dataclass(frozen=True, slots=True)
class Replica:
    processes: tuple[ReplicaRecord, ...]
    """One on each of its slots, in order."""

    @property
    def ids(self) -> tuple[str, ...]:
        return tuple(each.replica_id for each in self.processes)

    @property
    def nodes(self) -> Mapping[str, int]:
        return Counter(each.node for each in self.processes)

    @property
    def state(self) -> ReplicaState:
        """Return the state of the process that is furthest behind."""
        states = {each.state for each in self.processes}
        return next(each for each in ReplicaState if each in states)

    @property
    def join_epochs(self) -> frozenset[int | None]:
        """Return the epochs at which its processes stand and wait."""
        return frozenset(each.join_epoch for each in self.processes)

    @property
    def launched_at(self) -> float:
        return min(each.launched_at for each in self.processes)

    @property
    def launch_index(self) -> int:
        return self.processes[0].launch_index


def whole_replicas(rows: Sequence[ReplicaRecord], size: int) -> tuple[list[Replica], list[ReplicaRecord]]:
    """Return the replicas of ``size`` processes that are complete, and the processes of those that are not."""
    if size == 1:
        return [Replica((row,)) for row in rows], []
    groups: dict[int, list[ReplicaRecord]] = {}
    for row in rows:
        groups.setdefault(replica_number(row, size), []).append(row)
    whole, torn = [], []
    for group in groups.values():
        if len(group) == size:
            whole.append(Replica(tuple(sorted(group, key=lambda row: row.launch_index))))
        else:
            torn += group
    return whole, torn


def replica_number(row: ReplicaRecord, size: int) -> int:
    """Return which of its trial's replicas a process belongs to; replicas are launched with consecutive indices."""
    return row.launch_index // size
