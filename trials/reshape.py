"""How a trial comes to another layout without an end of its processes: pure, like the plan, and in three stages.

New processes come to where they need the others while the trial trains. Then its replicas are told to end at a step
boundary, all alike, and their processes make up the new ones with those that came. When all of them stand at their
first step, they enter a generation. Whatever is lost before the old replicas have ended leaves the trial as it was;
what is lost after that sends it back to its checkpoint, which is written at that moment.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass

from dist_core.link.reshape import Reshape
from trials.plan import (
    BROKEN_PATIENCE_SECONDS,
    CONTACT_DEADLINE_SECONDS,
    JOIN_DEADLINE_SECONDS,
    PAUSE_DEADLINE_SECONDS,
    SWITCH_DEADLINE_SECONDS,
)
from trials.record import ReplicaRecord, ReplicaState, TrialRecord

LOST = "a process that it needs was lost"


@dataclass(frozen=True, slots=True)
class Seat:
    """A place in a new replica, and who takes it; nobody yet where a process is to be started."""

    node: str
    replica_id: str = ""


@dataclass(frozen=True, slots=True)
class Wait:
    """For replicas to do what they have been told."""


@dataclass(frozen=True, slots=True)
class Offer:
    """The replicas that train are to end, for these new ones."""


@dataclass(frozen=True, slots=True)
class Settle:
    """They have ended: the new ones count."""


@dataclass(frozen=True, slots=True)
class Form:
    """All stand at their first step: they are to enter a generation."""


@dataclass(frozen=True, slots=True)
class GiveUp:
    """The trial goes on with these members as it is; processes that came for the new replicas end."""

    members: tuple[str, ...] = ()
    """To be offered anew; empty where nothing else had been."""
    why: str = ""
    """It will not come to this layout so; empty: something else is wanted by now, or somebody was lost."""
    has_paused: bool = False
    """Its replicas have all ended instead, as for a pause: their code does not run again."""


@dataclass(frozen=True, slots=True)
class Fail:
    """All end: the trial goes on from its checkpoint."""

    why: str


@dataclass(frozen=True, slots=True)
class Over:
    """The new replicas train."""


Step = Wait | Offer | Settle | Form | GiveUp | Fail | Over


def seats(
    members: Sequence[ReplicaRecord], wanted: Mapping[str, int], size: int, most_on_a_node: int
) -> tuple[tuple[Seat, ...], ...]:
    """Those of the replicas of ``size`` that a trial is to have, with its present ``members`` (by rank) where they are.

    Empty where the ``wanted`` slots by node do not make up whole replicas.
    """
    staying: dict[str, list[str]] = {}
    for row in members:
        staying.setdefault(row.node, []).append(row.replica_id)
    # The nodes of those that stay come first: who reports goes on to do so where that can be.
    nodes = sorted((node for node, count in wanted.items() if count > 0), key=lambda node: node not in staying)
    by_node = []
    for node in nodes:
        there = staying.get(node, [])[: wanted[node]]
        by_node.append([Seat(node, each) for each in there] + [Seat(node)] * (wanted[node] - len(there)))
    if size > most_on_a_node:
        by_node = [[seat for places in by_node for seat in places]]
    if any(len(places) % size for places in by_node):
        return ()
    return tuple(tuple(places[at : at + size]) for places in by_node for at in range(0, len(places), size))


def next_step(
    trial: TrialRecord,
    reshape: Reshape,
    rows: Sequence[ReplicaRecord],
    now: float,
    *,
    before: Sequence[str],
    is_wanted: bool,
    is_settled: bool,
    leaving: Set[str] = frozenset(),
    broken_since: float | None = None,
    departed: Set[str] = frozenset(),
) -> Step:
    """What to do next for it; ``rows`` are the trial's processes that are not gone.

    ``before``: its members when it began, by rank. ``is_wanted``: whether this is still what was decided.
    ``is_settled``: whether that the old replicas have ended has been noted. ``departed``: those of them that have ended
    by themselves and without an error. The others are as for `trials.plan.plan`.
    """
    by_id = {row.replica_id: row for row in rows}
    new = [by_id[name] for name in reshape.processes if name in by_id]
    if trial.generation < reshape.number:
        if trial.published == reshape.number:
            return _offered(trial, reshape, by_id, now, before, leaving, broken_since, departed)
        return _before_the_offer(trial, reshape, by_id, new, now, before, is_wanted, leaving, broken_since)
    if not is_settled:
        return Settle()
    if trial.members:
        return Over()
    if len(new) < len(reshape.processes):
        return Fail("one of its processes was lost")
    if now - trial.rescaled_at > JOIN_DEADLINE_SECONDS:
        return Fail(f"its processes did not come to a first step within {JOIN_DEADLINE_SECONDS:.0f} s")
    if broken_since is not None and now - broken_since > BROKEN_PATIENCE_SECONDS:
        return Fail("its processes lost each other")
    stands = all(row.state is ReplicaState.READY for row in new)
    late = now - trial.published_at > SWITCH_DEADLINE_SECONDS
    return Form() if stands and (late or not trial.switching) else Wait()


def _before_the_offer(
    trial: TrialRecord,
    reshape: Reshape,
    by_id: Mapping[str, ReplicaRecord],
    new: Sequence[ReplicaRecord],
    now: float,
    before: Sequence[str],
    is_wanted: bool,
    leaving: Set[str],
    broken_since: float | None,
) -> Step:
    """New processes come while the old replicas train, if nothing happens to those."""
    are_well = broken_since is None and leaving.isdisjoint(before) and by_id.keys() >= set(before)
    if not are_well or trial.switching or not is_wanted:
        return GiveUp()
    if len(new) < len(reshape.processes):
        return GiveUp(why=LOST)
    came = [row for row in new if row.replica_id not in before]
    for row in came:
        unheard = row.contact_at is None and now - row.launched_at > CONTACT_DEADLINE_SECONDS
        if unheard or (row.ready_at is None and now - row.launched_at > JOIN_DEADLINE_SECONDS):
            return GiveUp(why="a process that it needs did not come")
    return Offer() if all(row.ready_at is not None for row in came) else Wait()


def _offered(
    trial: TrialRecord,
    reshape: Reshape,
    by_id: Mapping[str, ReplicaRecord],
    now: float,
    before: Sequence[str],
    leaving: Set[str],
    broken_since: float | None,
    departed: Set[str],
) -> Step:
    """The old replicas train until they have heard of it, and are at a step."""
    left = tuple(name for name in before if name in by_id)
    if not left:
        return GiveUp(has_paused=departed >= set(before))
    # Others of them may leave as soon as all have agreed, before that is heard of here.
    gone = {name for name in before if name in (*reshape.processes, *reshape.holders) and name not in by_id}
    waited = now - trial.published_at
    if gone and gone <= departed:
        return GiveUp(left) if waited > PAUSE_DEADLINE_SECONDS else Wait()
    if gone or broken_since is not None or not leaving.isdisjoint(before):
        return GiveUp(tuple(name for name in left if name not in leaving))
    if not by_id.keys() >= set(reshape.processes):
        return GiveUp(left, why=LOST)
    if waited > SWITCH_DEADLINE_SECONDS:
        return GiveUp(left, why="its replicas came to no step at which they could end")
    return Wait()
