"""Replicas as the plan sees them: the processes of one replica as a whole, of which none does without the others."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from trials.record import ReplicaRecord, ReplicaState


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
