"""Heal: what survivors do when a replica is lost, to go on from the furthest of them without it.

The last collective of a generation may be complete on some replicas and fail on others, because one that was to leave
behind it is gone too early. The former enter the next generation, and the latter, who cannot know of it, come to heal
there. So whoever comes into a generation without joiners first says which of the two it does; if one heals, all do.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from dist_core.errors import EXIT_PEER_LOST, EXIT_PREEMPTED, PeerLost, ReplicaExit
from dist_core.generations.generation import Generation
from dist_core.generations.losses import Losses
from dist_core.generations.membership import Membership, Prepared
from dist_core.generations.process_groups import ReplicaGroup
from dist_core.generations.state_transfer import hand_over
from dist_core.generations.step_record import Standing
from dist_core.link.news import News

HEAL_SECONDS = 90.0
"""Longest wait for a generation without the lost replica; then the trial resumes from its checkpoint.

Longer than an offer that nobody can enter stays open.
"""
LEAVER_PATIENCE_SECONDS = 3.0


class Survivor(Protocol):
    """This replica's training, as far as a loss concerns it."""

    def standing(self) -> Standing: ...

    def go_back_behind_loop(self) -> None:
        """Prepare to run the code again from behind the epoch's last training loop."""
        ...

    def states(self) -> dict[str, Any]: ...

    def take(self, states: dict[str, Any], *, is_a_step_behind: bool) -> None:
        """Go on from the furthest survivor's states."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Healed:
    """Point from which a trial goes on after a loss."""

    prepared: Prepared
    """The generation to enter."""
    furthest: Standing
    """Position to go on from."""
    runs_again: bool
    """The epoch's code runs again from behind its last training loop."""


class Heal:
    def __init__(self, generation: Generation, losses: Losses, membership: Membership, news: News) -> None:
        self._generation = generation
        self._losses = losses
        self._membership = membership
        self._news = news

    def wait_and_meet(self, survivor: Survivor, *, reason: str, enter: Callable[[Healed], None]) -> Healed:
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
                    with self._losses.meeting(prepared) as group:
                        _say_who_heals(group, heals=True)
                        healed = self._meet(prepared, group, survivor)
                        enter(healed)
                except PeerLost:
                    # One of these is gone as well; the scheduler sees it and publishes again.
                    prepared.group.break_off()
                    self._membership.abandon(prepared.generation.number)
                    self._say_that_we_wait()
                    continue
                return healed
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

    def leave_if_told(self) -> None:
        """Raise ReplicaExit if this replica was told to leave."""
        if self._membership.must_leave is not None:
            self._news.flush()
            raise ReplicaExit("preempted", EXIT_PREEMPTED)

    def warn(self, message: str) -> None:
        self._news.warn(message)

    def _say_that_we_wait(self) -> None:
        self._news.announce("/broken", {"generation": self._generation.number})

    def meet_if_awaited(
        self, prepared: Prepared, survivor: Survivor, *, enter: Callable[[Healed], None]
    ) -> Healed | None:
        """Meet in a generation without joiners if any of its replicas heals; return None if none does. Collective.

        If one does, this replica has entered with it on return. Raises PeerLost when a member is gone.
        """
        with self._losses.meeting(prepared) as group:
            if not _say_who_heals(group, heals=False):
                return None
            healed = self._meet(prepared, group, survivor)
            enter(healed)
            return healed

    def _may_go_on_with(self, prepared: Prepared, waited_seconds: float) -> bool:
        if prepared.group is None:
            # Told to leave by a generation that may hold the lost replica: give the one that replaces it a moment.
            return not prepared.generation.members or waited_seconds > LEAVER_PATIENCE_SECONDS
        # Those who have not lost this one give joiners the trial's state: they come to another meeting than this.
        joinerless = prepared.generation.join_epoch is None
        return joinerless and set(prepared.generation.members) <= set(self._generation.members)

    def _meet(self, prepared: Prepared, group: ReplicaGroup, survivor: Survivor) -> Healed:
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
        return Healed(prepared=prepared, furthest=furthest, runs_again=runs_again)


def _say_who_heals(group: ReplicaGroup, *, heals: bool) -> bool:
    """Tell whether any replica of a generation without joiners heals; its first collective."""
    return any(group.sum_of(float(heals), what="votes"))
