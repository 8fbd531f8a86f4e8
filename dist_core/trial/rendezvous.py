"""Rendezvous: what all replicas do at one place of their code outside of a step's own round; a loss does not end it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

from dist_core.errors import PeerLost
from dist_core.generations.generation import Generation
from dist_core.generations.process_groups import ReplicaGroup
from dist_core.generations.step_record import StepRecord
from dist_core.link.news import News
from dist_core.state.position import Position
from dist_core.trial.departure import Leaving
from dist_core.trial.healing import Heals
from dist_core.trial.voters import SameCode

T = TypeVar("T")


class Rendezvous:
    def __init__(
        self,
        generation: Generation,
        position: Position,
        record: StepRecord,
        leaving: Leaving,
        healing: Heals,
        same_code: SameCode,
    ) -> None:
        self._generation = generation
        self._position = position
        self._record = record
        self._leaving = leaving
        self._healing = healing
        self._same_code = same_code

    def do(self, action: Callable[[ReplicaGroup], T], *, otherwise: Callable[[], T] | None = None) -> T:
        """Return the result of what all replicas, or those that are left, do at this place of their code.

        Within a training loop a step is under way that does not count then: its body runs again, and here it goes on
        with ``otherwise``. Raises PeerLost there if nothing is given, and RunAgain as healing does.
        """
        generation, position = self._generation, self._position
        if not position.in_training_loop:
            self._leaving.raise_postponed()
        while True:
            try:
                if generation.broken is not None:
                    raise PeerLost(generation.broken)
                if not position.in_training_loop and generation.joined:
                    self._same_code.check()
                result = action(generation.group)
                if not position.in_training_loop:
                    self._record.note_meeting()
                return result
            except PeerLost as error:
                if not generation.joined or (position.in_training_loop and otherwise is None):
                    raise
                generation.mark_broken(str(error))
            if position.in_training_loop and otherwise is not None:
                return otherwise()
            self._healing.heal_between_steps()

    def sum_between_steps(self, values: Sequence[float]) -> list[float] | None:
        """Return sums over all replicas.

        None if one was lost, and the others have rebuilt the trial without it.
        """
        try:
            if self._generation.broken is not None:
                raise PeerLost(self._generation.broken)
            return self._generation.group.sum_of(*values, what="samples of a step")
        except PeerLost as error:
            self._generation.mark_broken(str(error))
            self._healing.heal(in_step=True)
            return None


class MetricMean:
    """A metric that each replica may have measured for itself."""

    def __init__(self, generation: Generation, rendezvous: Rendezvous, news: News) -> None:
        self._generation = generation
        self._rendezvous = rendezvous
        self._news = news
        self._has_told = False

    def of(self, value: float) -> float:
        """Return the mean of a number that every replica has; exactly that number if it is the same everywhere.

        The number itself where a replica is lost within a step, which is broken then.
        """
        if self._generation.stands_alone:
            return value

        def gather(group: ReplicaGroup) -> list[float]:
            values = torch.zeros(group.world_size, dtype=torch.float64)
            values[group.rank] = value
            group.sum(values, what="metrics")
            return [float(each) for each in values]

        values = self._rendezvous.do(gather, otherwise=lambda: [value])
        if len(set(values)) == 1:
            return value
        if not self._has_told:
            self._has_told = True
            self._news.warn(
                "a learning rate schedule got a different metric on each replica "
                f"({', '.join(f'{each:.6g}' for each in values)}): it follows their mean. Sum the metric with an "
                "Accumulator to get its value over all samples"
            )
        return math.fsum(values) / len(values)
