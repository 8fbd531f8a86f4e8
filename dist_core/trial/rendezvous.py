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
from dist_core.generations.step_vote import StepVote
from dist_core.link.news import News
from dist_core.state.position import Position
from dist_core.trial.leaving import Leaving
from dist_core.trial.same_weights import SameWeights
from dist_core.trial.transitions import Transitions
from dist_core.trial.voters import SamePlace

T = TypeVar("T")


class Rendezvous:
    def __init__(
        self,
        generation: Generation,
        position: Position,
        record: StepRecord,
        leaving: Leaving,
        transitions: Transitions,
        news: News,
        vote: StepVote,
        place: SamePlace,
        weights: SameWeights,
    ) -> None:
        self._generation = generation
        self._position = position
        self._record = record
        self._leaving = leaving
        self._news = news
        self._transitions = transitions
        self._vote = vote
        self._place = place
        self._weights = weights
        self._told_of_metrics = False

    def do(self, action: Callable[[ReplicaGroup], T], *, otherwise: Callable[[], T] | None = None) -> T:
        """The result of what all replicas do at this place of their code; of those that are left if one is lost.

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
                    self._refuse_who_trains_on()
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
            self._transitions.heal(in_step=False)
            lacks = ". Sums of an evaluation lack what that one had seen" if position.has_evaluated else ""
            self._news.warn(f"a replica was lost outside of the training loop; the others go on without it{lacks}")

    def _refuse_who_trains_on(self) -> None:
        """Nor do replicas add up what they have found out about different models."""
        world_size = self._generation.group.world_size
        # Of a replica's processes some may have sums of their own.
        if world_size > 1 and self._generation.group.members == 1:
            place, weights = self._place, self._weights
            agreed = self._vote.meet(lambda: {place.name: place.behind(), weights.name: weights.put_all()})
            if agreed is not None:
                place.take_behind(agreed[place.name])
                weights.take(agreed[weights.name], world_size)

    def sum_between_steps(self, values: Sequence[float]) -> list[float] | None:
        """Sums over all replicas; None if one was lost, and the others have rebuilt the trial without it."""
        vector = torch.tensor(values, dtype=torch.float64)
        try:
            if self._generation.broken is not None:
                raise PeerLost(self._generation.broken)
            self._generation.group.sum(vector, what="samples of a step")
        except PeerLost as error:
            self._generation.mark_broken(str(error))
            self._transitions.heal(in_step=True)
            return None
        found: list[float] = vector.tolist()
        return found

    def mean_of(self, value: float) -> float:
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

        values = self.do(gather, otherwise=lambda: [value])
        if len(set(values)) == 1:
            return value
        if not self._told_of_metrics:
            self._told_of_metrics = True
            self._news.warn(
                f"a schedule was given another metric on each replica ({', '.join(f'{each:.6g}' for each in values)}): "
                "it follows their mean. Sum the metric with an Accumulator to have that of all samples"
            )
        return math.fsum(values) / len(values)
