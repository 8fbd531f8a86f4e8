"""Transitions: from one generation to the next, at a step boundary that all replicas agree on."""

from __future__ import annotations

import time
from collections.abc import Sequence

from dist_core.generations.decision import Decision
from dist_core.generations.generation import Generation
from dist_core.generations.membership import Prepared
from dist_core.generations.running_sums import RunningSums
from dist_core.generations.step_vote import Voter
from dist_core.generations.switch import Switch
from dist_core.trial.departure import Departure
from dist_core.trial.entering import Entering
from dist_core.trial.healing import Healing


class Transitions(Voter):
    name = "generation"

    def __init__(
        self,
        generation: Generation,
        switch: Switch,
        healing: Healing,
        entering: Entering,
        departure: Departure,
        sums: RunningSums,
    ) -> None:
        self._generation = generation
        self._switch = switch
        self._healing = healing
        self._entering = entering
        self._departure = departure
        self._sums = sums

    def put(self) -> Sequence[float]:
        return self._switch.vote(self._generation.prepared)

    def follow(self, agreed: Sequence[float]) -> None:
        """Enter the generation that was prepared if all replicas have voted for it, with rank 0's batch for it."""
        prepared = self._generation.prepared
        # Nobody but membership may hold the other group: where it is not entered, its joiners learn of that by its end.
        self._generation.prepare(None)
        if prepared is None:
            return
        decision = self._switch.decide(prepared, agreed)
        if decision is Decision.STAY:
            return
        self._entering.batch.forget_next()
        if decision is Decision.ABANDON:
            self._switch.abandon(prepared)
        else:
            self._enter_with_all(prepared)

    def _enter_with_all(self, prepared: Prepared) -> None:
        started = time.perf_counter()
        self._sums.settle()
        if self._generation.broken is not None and prepared.group is not None:
            # Others may have what was just summed, and enter: who they cannot go on with says so there.
            self._healing.heal(in_step=False)
            return
        if prepared.group is None:
            if not prepared.generation.members:
                self._departure.leave_paused()
            self._departure.make_way()
        # Before the state is handed over: it goes to the joiners with it.
        self._entering.batch.use_for_next()
        if self._switch.has_joiners(prepared):
            if not self._switch.hand_over(prepared):
                self._entering.batch.agree()
                return
            self._entering.enter(prepared, agree=False)
        else:
            self._healing.enter_smaller(prepared)
        self._entering.say_that_we_switched(since=started)
