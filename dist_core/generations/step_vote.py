"""The small reduction that every optimizer step makes: flags, decisions and measurements, summed over the replicas.

Each voter puts numbers in under a name of its own, and is told their sums. The round is launched when a step's first
gradients are reduced, or at the step's end, and looked at when the step is over. The list of voters is the protocol: it
stands in ``dist_core/trial/replica.py``, and is the same on all replicas.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist

from dist_core.generations.fuse import CONNECTIONS_ABORTED
from dist_core.generations.generation import Generation
from dist_core.generations.membership import Prepared
from dist_core.generations.process_groups import ReplicaGroup
from dist_core.life import Listener

Ballot = Mapping[str, Sequence[float]]
"""Values that a replica votes with, by name; the same names, lengths and order on all replicas."""


class Voter:
    """A part of the round of each step. It may also be a ``Listener``."""

    name: str

    def put(self) -> Sequence[float]:
        """Return numbers, as many on all replicas, while a step's gradients are reduced and before its update."""
        return ()

    def take(self, agreed: Sequence[float], world_size: int) -> None:
        """Take the sums, when all replicas have made the step, before it is counted; raise InvalidTraining, on all."""

    def follow(self, agreed: Sequence[float]) -> None:
        """Do what was decided, once the step is counted. May raise what ends this replica."""


@dataclass(slots=True)
class Round:
    _vector: torch.Tensor
    _places: dict[str, slice]
    _voters: Sequence[Voter]
    world_size: int
    _work: dist.Work | None
    _wait_for: Callable[[dist.Work], None]

    def __getitem__(self, name: str) -> list[float]:
        """Return the sums over all replicas of what they put in under this name."""
        sums: list[float] = self._vector[self._places[name]].tolist()
        return sums

    def take(self) -> None:
        """Tell all voters the sums, before the step is counted."""
        for voter in self._voters:
            voter.take(self[voter.name], self.world_size)

    def follow(self) -> None:
        """Have all voters do what was decided, in order."""
        for voter in self._voters:
            voter.follow(self[voter.name])

    @property
    def is_over(self) -> bool:
        """Tell whether it has been waited for, and its sums can be read."""
        return self._work is None

    def wait(self) -> None:
        """Wait until all replicas have taken part; raise RuntimeError when one is gone."""
        work, self._work = self._work, None
        if work is not None:
            self._wait_for(work)


class StepVote(Listener):
    """The round of a replica's present step.

    A replica that is gone raises nothing here: it breaks the present generation, which whoever looks finds then.
    """

    def __init__(self, generation: Generation, pending: Callable[[], Prepared | None] = lambda: None) -> None:
        self._generation = generation
        self._pending = pending
        self.voters: Sequence[Voter] = ()
        self._lock = threading.Lock()
        self._round: Round | None = None
        self.reduces = False
        """True once this replica has begun to reduce gradients in the present step's body."""
        self._places: tuple[ReplicaGroup, Mapping[str, slice]] | None = None
        """Places of the last round's parts, with the group that it was of: all replicas of that group have the same."""

    def launch(self, *, reduces: bool = False) -> None:
        """Start the step's round, once a step; later calls of a step do nothing.

        ``reduces``: its first gradients are reduced now.
        """
        self.reduces = self.reduces or reduces
        with self._breaking(), self._lock:
            if self._round is None:
                group = self._generation.group
                self._generation.prepare(self._pending())
                self._round = _round_of(self.voters, group)
                self._places = group, self._round._places
                self._round._work = group.sum_later(self._round._vector)

    def wait(self) -> None:
        """Wait for the present step's round, if it was launched."""
        with self._breaking():
            if self._round is not None:
                self._round.wait()

    @property
    def under_way(self) -> Round | None:
        """Round of the present step, once it was launched."""
        return self._round

    def finish(self) -> Round | None:
        """Return the present step's round when all have taken part; None where a replica is gone."""
        round_, self._round, self.reduces = self._round, None, False
        with self._breaking():
            if round_ is not None:
                round_.wait()
        if self._generation.group.aborted.is_set():
            self._generation.mark_broken(CONNECTIONS_ABORTED)
        return round_ if self._generation.broken is None else None

    def meet(self, ballot: Callable[[], Ballot]) -> Round | None:
        """Take part in a round that is no step's, with this alone: whoever is in a step meets it there.

        None where no step of this generation has been made, of which the others are as sure. Raises PeerLost.
        """
        group = self._generation.group
        if self._places is None or self._places[0] is not group:
            return None
        places = dict(self._places[1])
        vector = torch.zeros(max(place.stop for place in places.values()), dtype=torch.float64)
        for name, numbers in ballot().items():
            vector[places[name]] = torch.tensor(numbers, dtype=torch.float64)
        group.sum(vector, what="places in the code")
        return Round(vector, places, (), group.world_size, None, group.fuse.wait)

    def lost(self) -> None:
        """Forget what is under way: the replicas it was between no longer are."""
        self._round = self._places = None
        self.reduces = False

    def runs_again(self) -> None:
        self.lost()

    @contextmanager
    def _breaking(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            self._generation.mark_broken(str(error))


def _round_of(voters: Sequence[Voter], group: ReplicaGroup) -> Round:
    numbers: list[float] = []
    places = {}
    for voter in voters:
        part = voter.put()
        places[voter.name] = slice(len(numbers), len(numbers) + len(part))
        numbers += part
    vector = torch.tensor(numbers, dtype=torch.float64)
    return Round(vector, places, voters, group.world_size, None, group.fuse.wait)
