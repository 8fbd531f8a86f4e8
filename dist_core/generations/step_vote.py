"""The small reduction that every optimizer step makes: flags, decisions and measurements, summed over the replicas.

Each part of a replica puts numbers in under a name of its own, and reads their sums under that name. The round is
launched when a step's first gradients are reduced, or at the step's end, and looked at when the step is over. Where
replicas train asynchronously it is looked at some steps later, at the same step by each of them: nobody is further
ahead of the slowest than that.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist

from dist_core.generations.present import PresentGeneration
from dist_core.generations.process_groups import ReplicaGroup
from dist_core.generations.watch import Prepared

Ballot = Mapping[str, Sequence[float]]
"""What a replica puts in, by the names of its parts; the same names and lengths in the same order on all of them."""


@dataclass(slots=True)
class Round:
    _vector: torch.Tensor
    _places: dict[str, slice]
    prepared: Prepared | None
    """The generation this replica had prepared when it put its numbers in."""
    _work: dist.Work | None
    _wait_for: Callable[[dist.Work], None]

    def __contains__(self, name: str) -> bool:
        return name in self._places

    def __getitem__(self, name: str) -> list[float]:
        """The sums over all replicas of what they put in under this name."""
        sums: list[float] = self._vector[self._places[name]].tolist()
        return sums

    def wait(self) -> None:
        """Until all replicas have taken part. Raises RuntimeError when one is gone."""
        work, self._work = self._work, None
        if work is not None:
            self._wait_for(work)

    def of_nobody(self) -> Round:
        """A round of the same names in which nobody had anything to say."""
        return Round(torch.zeros_like(self._vector), self._places, None, None, self._wait_for)


class StepVote:
    """The rounds of one replica: the present step's, and those that are not looked at yet.

    A replica that is gone raises nothing here: it breaks the present generation, which whoever looks finds then.
    """

    def __init__(self, present: PresentGeneration) -> None:
        self._generation = present
        self._lock = threading.Lock()
        self._present: Round | None = None
        self._late: deque[Round] = deque()

    @property
    def steps_ahead(self) -> int:
        """Steps that this replica has made and that it does not know all others to have made."""
        return len(self._late)

    def launch(self, compose: Callable[[], tuple[Ballot, Prepared | None]]) -> None:
        """Once a step; the later calls of a step do nothing."""
        with self._breaking(), self._lock:
            if self._present is None:
                group = self._generation.group
                ballot, prepared = compose()
                self._present = _round_of(ballot, prepared, group)
                self._present._work = group.sum_later(self._present._vector)

    def wait(self) -> None:
        """For the present step's round, if it was launched."""
        with self._breaking():
            if self._present is not None:
                self._present.wait()

    def finish(self, lag: int) -> Round | None:
        """The round to act on at the end of this step: its own, or that of ``lag`` steps before.

        At the start there is none so far back, and nothing to act on. None where a replica is gone.
        """
        present, self._present = self._present, None
        due: Round | None = None
        with self._breaking():
            due = self._due(present, lag)
            if due is not None:
                due.wait()
        if self._generation.group.aborted.is_set():
            self._generation.mark_broken("the replicas' connections were broken off")
        return due if self._generation.broken is None else None

    def _due(self, present: Round | None, lag: int) -> Round | None:
        if present is None or lag == 0:
            return present
        self._late.append(present)
        return present.of_nobody() if len(self._late) <= lag else self._late.popleft()

    def drain(self) -> None:
        """Until all replicas have come as far as this one; what they agree on meanwhile is agreed on again."""
        with self._breaking():
            while self._late:
                self._late.popleft().wait()

    def reset(self) -> None:
        """Forget what is under way: the replicas it was between no longer are."""
        self._present = None
        self._late.clear()

    @contextmanager
    def _breaking(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            self._generation.mark_broken(str(error))


def _round_of(ballot: Ballot, prepared: Prepared | None, group: ReplicaGroup) -> Round:
    numbers: list[float] = []
    places = {}
    for name, part in ballot.items():
        places[name] = slice(len(numbers), len(numbers) + len(part))
        numbers += part
    return Round(torch.tensor(numbers, dtype=torch.float64), places, prepared, None, group.fuse.wait)
