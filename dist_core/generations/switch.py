"""Switch: from the present generation to the next one, at a step boundary that all replicas agree on."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from dist_core.errors import PeerLost
from dist_core.generations.decision import Decision, decide_switch, vote_for
from dist_core.generations.generation import DRY_STEPS, Generation
from dist_core.generations.membership import Membership, Prepared
from dist_core.generations.state_transfer import share_state
from dist_core.link.news import News
from dist_core.state.persistence import Persistence
from dist_core.state.position import Position
from dist_core.state.script_variables import NAME as VARIABLES

logger = logging.getLogger(__name__)


class Switch:
    def __init__(
        self,
        generation: Generation,
        membership: Membership,
        position: Position,
        states: Persistence,
        news: News,
    ) -> None:
        self._generation = generation
        self._membership = membership
        self._position = position
        self._states = states
        self._news = news

    def vote(self, prepared: Prepared | None) -> Sequence[float]:
        """Return this replica's values for a step's round."""
        if prepared is None or not self._may_be_entered(prepared):
            return vote_for(None)
        return vote_for(prepared.generation.number)

    def _may_be_entered(self, prepared: Prepared) -> bool:
        """Tell whether our gradient buckets are as after two passes, as a joiner's are, so that it may be let in."""
        # A joiner stands in its epoch's first loop.
        settled = self._position.steps_with_gradients >= DRY_STEPS and self._position.is_first_loop
        return settled or not self.has_joiners(prepared)

    def has_joiners(self, prepared: Prepared) -> bool:
        return not set(prepared.generation.members) <= set(self._generation.members)

    def decide(self, prepared: Prepared, votes: Sequence[float]) -> Decision:
        """Decide on the switch, the same on all replicas, from the sums of what they have voted."""
        count, total, squares = votes
        decision = decide_switch(
            count=count,
            total=total,
            squares=squares,
            world_size=self._generation.group.world_size,
            pending=prepared.generation,
            epoch=self._position.epoch,
        )
        if decision is Decision.COMMIT and self._position.awaits_update:
            # Joiners would not have what has been summed up by now, nor would a checkpoint.
            return Decision.STAY
        return decision

    def hand_over(self, prepared: Prepared) -> bool:
        """Give the joiners the trial's state; False if the switch is given up, because one of them is gone.

        The group that trains is whole then: all stay in it.
        """
        members = prepared.generation.members
        new = [rank for rank, name in enumerate(members) if name not in self._generation.members]
        received: dict[str, Any] | None = None
        try:
            with self._generation.meeting(prepared) as group:
                joiners = sorted({rank // group.members for rank in new})
                received = share_state(
                    group.data_parallel,
                    self._states.capture(),
                    joiners=joiners,
                    is_replicated=self._states.is_replicated(),
                )
        except PeerLost as error:
            logger.warning(
                "switch to a new generation abandoned generation=%d error=%s", prepared.generation.number, error
            )
        if not self._generation.succeeded_everywhere(received is not None):
            self.abandon(prepared)
            return False
        if group.data_parallel.rank != 0 and received is not None:
            self._states.before_update()
            # What this replica's script keeps in its variables, it has by itself.
            self._states.restore({name: each for name, each in received.items() if name != VARIABLES})
        return True

    def abandon(self, prepared: Prepared) -> None:
        """Stay in the present generation; dropping the other group tells its joiners."""
        self._membership.abandon(prepared.generation.number)
        if self._generation.group.rank == 0:
            self._news.announce("/abandoned", {"generation": prepared.generation.number})
