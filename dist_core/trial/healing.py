"""Healing: how replicas go on when one of them is lost, from the furthest of them and without it.

The last collective of a generation may be complete on some replicas and fail on others, because one that was to leave
behind it is gone too early. The former enter the next generation, and the latter, who cannot know of it, come to heal
there. So whoever comes into a generation without joiners first says which of the two it does; if one heals, all do.
"""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import Any, Protocol

from dist_core.errors import EXIT_PEER_LOST, EXIT_PREEMPTED, PeerLost, ReplicaExit, RunAgain
from dist_core.generations.generation import Generation
from dist_core.generations.membership import Membership, Prepared
from dist_core.generations.process_groups import ReplicaGroup
from dist_core.generations.running_sums import ACCUMULATOR_PREFIX, RunningSums
from dist_core.generations.state_transfer import hand_over
from dist_core.generations.step_record import Standing, StepRecord
from dist_core.life import Life
from dist_core.link.news import News
from dist_core.state.persistence import Persistence
from dist_core.state.position import Position
from dist_core.trial.entering import Entering
from dist_core.trial.rollback import Rollback

HEAL_SECONDS = 90.0
"""Longest wait for a generation without the lost replica; then the trial resumes from its checkpoint.

Longer than an offer that nobody can enter stays open.
"""
LEAVER_PATIENCE_SECONDS = 3.0


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
    """This replica's training, as far as a lost replica concerns it."""

    def __init__(
        self,
        position: Position,
        states: Persistence,
        record: StepRecord,
        sums: RunningSums,
        rollback: Rollback,
        life: Life,
    ) -> None:
        self._position = position
        self._states = states
        self._record = record
        self._sums = sums
        self._rollback = rollback
        self._life = life

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
        self._life.step_repeats()

    def go_back_behind_loop(self) -> None:
        """Prepare to run the code again from behind the epoch's last training loop."""
        if not self._position.in_training_loop:
            self._rollback.go_back_behind_loop()
            self._rollback.forget()
            # Also where this group loses one before it trains.
            self._position.take_evaluation(as_made=True)

    def states(self) -> dict[str, Any]:
        return self._states.capture()

    def take(self, states: dict[str, Any], *, is_a_step_behind: bool) -> None:
        """Go on from the furthest survivor's states."""
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
        news: News,
        survivor: TrainingSurvivor,
        entering: Entering,
        life: Life,
    ) -> None:
        self._generation = generation
        self._membership = membership
        self._news = news
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
            self._leave_if_told()
        self.drop_group()
        runs_again = self._wait_and_meet(reason)
        self._entering.say_that_we_switched(since=started)
        self._run_again_if(needed=runs_again)

    def heal_between_steps(self) -> None:
        self.heal(in_step=False)
        lacks = "; sums of an evaluation lack the samples of the lost one" if self._survivor.has_evaluated else ""
        self._news.warn(f"a replica was lost outside of the training loop; the others go on without it{lacks}")

    def drop_group(self) -> None:
        """Close what connects this replica with the others; whoever still waits for it learns of the loss by that."""
        needs = self._membership.group_needs
        assert needs is not None
        self._generation.drop(needs())
        self._life.lost()

    def enter_smaller(self, prepared: Prepared) -> None:
        """Enter a generation that some leave and nobody joins: all that stay have the trial's state."""
        lost = runs_again = None
        try:
            runs_again = self._meet_if_awaited(prepared)
        except PeerLost as error:
            # Others may have entered already: this replica heals with them from there.
            lost = str(error)
        if runs_again is not None:
            self._run_again_if(needed=runs_again)
            return
        self._entering.enter(prepared, agree=False)
        if lost is not None:
            self._generation.mark_broken(lost)

    def _run_again_if(self, *, needed: bool) -> None:
        if needed:
            self._news.warn(
                "a replica was lost in an evaluation, and its part of the results with it: the training code runs "
                "again from its top and repeats the evaluation with the remaining replicas"
            )
            raise RunAgain

    # ------------------------------------------------------------------ meeting those that are left

    def _wait_and_meet(self, reason: str) -> bool:
        """Wait for the generation without the lost replica, go on from the furthest survivor and enter.

        Possible at a step boundary of the epoch everybody is in; elsewhere PeerLost ends this replica and the trial
        resumes from its checkpoint.
        """
        started = time.perf_counter()
        self._say_that_we_wait()
        self._membership.break_off_superseded()
        while time.perf_counter() - started < HEAL_SECONDS and self._membership.must_leave is None:
            prepared = self._membership.pending()
            if prepared is not None and self._may_go_on_with(prepared, time.perf_counter() - started):
                if prepared.group is None:
                    break
                try:
                    with self._generation.meeting(prepared) as group:
                        _say_who_heals(group, heals=True)
                        runs_again = self._meet(prepared, group)
                except PeerLost:
                    # One of these is gone as well; the scheduler sees it and publishes again.
                    prepared.group.break_off()
                    self._membership.abandon(prepared.generation.number)
                    self._say_that_we_wait()
                    continue
                return runs_again
            if prepared is not None and prepared.group is not None and not self._may_go_on_with(prepared, 0.0):
                # Others may wait in it for this replica, to give its joiners the trial's state.
                prepared.group.break_off()
                self._membership.abandon(prepared.generation.number)
                if prepared.as_joiner:
                    raise PeerLost(
                        "the replica that let this one join has vanished, and no other replica knows of this one, "
                        f"which ends; the scheduler starts another one: {reason}"
                    )
            time.sleep(0.005)
        raise PeerLost(f"another replica vanished, and the trial formed no new generation without it: {reason}")

    def _leave_if_told(self) -> None:
        """Raise ReplicaExit if this replica was told to leave."""
        if self._membership.must_leave is not None:
            self._news.flush()
            raise ReplicaExit("preempted", EXIT_PREEMPTED)

    def _say_that_we_wait(self) -> None:
        self._news.announce("/broken", {"generation": self._generation.number})

    def _meet_if_awaited(self, prepared: Prepared) -> bool | None:
        """Meet in a generation without joiners if any of its replicas heals; return None if none does. Collective.

        If one does, this replica has entered with it on return. Raises PeerLost when a member is gone.
        """
        with self._generation.meeting(prepared) as group:
            return self._meet(prepared, group) if _say_who_heals(group, heals=False) else None

    def _may_go_on_with(self, prepared: Prepared, waited_seconds: float) -> bool:
        if prepared.group is None:
            # Told to leave by a generation that may hold the lost replica: give the one that replaces it a moment.
            return not prepared.generation.members or waited_seconds > LEAVER_PATIENCE_SECONDS
        # Those who have not lost this one give joiners the trial's state: they come to another meeting than this.
        joinerless = prepared.generation.join_epoch is None
        return joinerless and set(prepared.generation.members) <= set(self._generation.members)

    def _meet(self, prepared: Prepared, group: ReplicaGroup) -> bool:
        """Enter the generation, and go on from where the furthest of its replicas stands.

        Returns whether the epoch's code runs again from behind its last training loop.
        """
        survivor = self._survivor
        standing = [Standing(**each) for each in group.gather_json(asdict(survivor.standing()))]
        # The lost replica may have completed its last collective with some of us and not with others: those are one
        # step ahead, or one update, and that counts.
        # Of a replica of several processes all have come equally far, or it has not come so far.
        size = group.members
        whole = [each for each in range(group.num_replicas) if len(set(standing[each * size : (each + 1) * size])) == 1]
        first = max(whole, key=lambda each: (*standing[each * size].come_so_far, -each), default=0)
        furthest = standing[first * size]
        if not whole or not all(each.can_go_on_from(furthest) for each in standing):
            self._news.warn(
                "a replica was lost while the others were at different places in the code outside a training step; "
                "the trial resumes from its last checkpoint"
            )
            self._news.flush()
            # Nobody goes before all know: those would wait for one that is lost.
            _say_who_heals(group, heals=True)
            raise ReplicaExit("survivors are at different places in the code", EXIT_PEER_LOST)
        runs_again = any(each.has_evaluated for each in standing)
        if runs_again:
            survivor.go_back_behind_loop()
        received = hand_over(group.data_parallel, survivor.states() if group.replica == first else None, source=first)
        if group.replica != first:
            survivor.take(received, is_a_step_behind=standing[group.rank].steps < furthest.steps)
        survivor.go_on_from(furthest)
        self._entering.enter(prepared, agree=True)
        return runs_again


def _say_who_heals(group: ReplicaGroup, *, heals: bool) -> bool:
    """Tell whether any replica of a generation without joiners heals; its first collective."""
    return any(group.sum_of(float(heals), what="votes"))


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
