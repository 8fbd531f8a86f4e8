"""Healing: how this replica goes on when another one is lost, and what of its training that concerns."""

from __future__ import annotations

import time
from typing import Any, Protocol

from dist_core.errors import PeerLost, RunAgain
from dist_core.generations.generation import Generation
from dist_core.generations.heal import Heal, Healed
from dist_core.generations.membership import Membership, Prepared
from dist_core.generations.running_sums import ACCUMULATOR_PREFIX, RunningSums
from dist_core.generations.step_record import Standing, StepRecord
from dist_core.life import Life
from dist_core.state.persistence import Persistence
from dist_core.state.position import Position
from dist_core.trial.entering import Entering
from dist_core.trial.rollback import Rollback
from dist_core.trial.script_habits import ScriptHabits


class Heals(Protocol):
    def heal(self, *, in_step: bool) -> None:
        """Recover from a lost replica: wait for the generation without it and go on from the furthest survivor.

        Possible at a step boundary of the epoch everybody is in; elsewhere PeerLost ends this replica and the trial
        resumes from its checkpoint. Raises RunAgain where the lost one has taken a part of an evaluation with it.
        """
        ...

    def heal_between_steps(self) -> None:
        """Heal outside of a training loop's steps, and say what evaluations lack by that."""
        ...


class TrainingSurvivor:
    """This replica's training, as far as a loss concerns it (``heal.Survivor``)."""

    def __init__(
        self,
        position: Position,
        states: Persistence,
        record: StepRecord,
        sums: RunningSums,
        rollback: Rollback,
        script_habits: ScriptHabits,
    ) -> None:
        self._position = position
        self._states = states
        self._record = record
        self._sums = sums
        self._rollback = rollback
        self._script_habits = script_habits

    @property
    def has_evaluated(self) -> bool:
        return self._position.has_evaluated

    def standing(self) -> Standing:
        position = self._position
        return Standing(
            steps=position.steps,
            updates=self._record.updates,
            epoch=position.epoch,
            meetings=self._record.meetings,
            has_evaluated=position.has_evaluated and position.in_epoch_loop and self._rollback.is_open,
        )

    def take_back_step(self) -> None:
        """Take the present step back: its body runs again."""
        self._sums.take_back()
        self._script_habits.take_back_step()

    def go_back_behind_loop(self) -> None:
        if not self._position.in_training_loop:
            self._rollback.go_back_behind_loop()
            self._rollback.forget()
            # Also where this group loses one before it trains.
            self._position.take_evaluation(as_made=True)

    def states(self) -> dict[str, Any]:
        return self._states.capture()

    def take(self, states: dict[str, Any], *, is_a_step_behind: bool) -> None:
        self._states.before_update()
        # What each has added since the sums were made is its own.
        if is_a_step_behind:
            self._sums.catch_up(states)
        own = {name: state for name, state in states.items() if not name.startswith(ACCUMULATOR_PREFIX)}
        self._states.restore(own)

    def go_on_from(self, furthest: Standing) -> None:
        self._record.go_on_from(furthest)


class Healing:
    def __init__(
        self,
        generation: Generation,
        membership: Membership,
        heal: Heal,
        survivor: TrainingSurvivor,
        entering: Entering,
        life: Life,
    ) -> None:
        self._generation = generation
        self._membership = membership
        self._heal = heal
        self._survivor = survivor
        self._entering = entering
        self._life = life

    def heal(self, *, in_step: bool) -> None:
        reason = self._generation.broken or "a collective failed"
        if in_step:
            self._survivor.take_back_step()
        started = time.perf_counter()
        if self._generation.group.members > 1:
            # Those of its replica that heard it first may have left; that is no loss.
            self._heal.leave_if_told()
        self.drop_group()
        healed = self._heal.wait_and_meet(self._survivor, reason=reason, enter=self._go_on)
        self._entering.say_that_we_switched(since=started)
        self._run_again_if_needed(healed)

    def heal_between_steps(self) -> None:
        self.heal(in_step=False)
        lacks = "; sums of an evaluation lack the samples of the lost one" if self._survivor.has_evaluated else ""
        self._heal.warn(f"a replica was lost outside of the training loop; the others go on without it{lacks}")

    def drop_group(self) -> None:
        """Close what connects this replica with the others; whoever still waits for it learns of the loss by that."""
        needs = self._membership.group_needs
        assert needs is not None
        self._generation.drop(needs())
        self._life.lost()

    def enter_smaller(self, prepared: Prepared) -> None:
        """Enter a generation that some leave and nobody joins: all that stay have the trial's state."""
        lost = healed = None
        try:
            healed = self._heal.meet_if_awaited(prepared, self._survivor, enter=self._go_on)
        except PeerLost as error:
            # Others may have entered already: this replica heals with them from there.
            lost = str(error)
        if healed is not None:
            self._run_again_if_needed(healed)
            return
        self._entering.enter(prepared, agree=False)
        if lost is not None:
            self._generation.mark_broken(lost)

    def _go_on(self, healed: Healed) -> None:
        self._survivor.go_on_from(healed.furthest)
        self._entering.enter(healed.prepared, agree=True)

    def _run_again_if_needed(self, healed: Healed) -> None:
        if healed.runs_again:
            self._heal.warn(
                "a replica was lost in an evaluation, and its part of the results with it: the training code runs "
                "again from its top and repeats the evaluation with the remaining replicas"
            )
            raise RunAgain


class NoHealing:
    """Recovery without a scheduler: raise PeerLost, because nobody can form a new generation."""

    def __init__(self, generation: Generation, sums: RunningSums) -> None:
        self._generation = generation
        self._sums = sums

    def heal(self, *, in_step: bool) -> None:
        if in_step:
            self._sums.take_back()
        raise PeerLost(f"another replica vanished: {self._generation.broken or 'a collective failed'}")

    def heal_between_steps(self) -> None:
        self.heal(in_step=False)
