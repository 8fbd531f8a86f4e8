"""Generation: the replicas that train together now, and this one's place among them."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from dist_core.errors import PeerLost
from dist_core.generations.group_needs import GroupNeeds
from dist_core.generations.membership import Prepared
from dist_core.generations.process_groups import ReplicaGroup, lone_group

DRY_STEPS = 2
"""Passes a joiner makes alone: they build its gradient buckets in the order that the survivors' have."""
LOSS_PATIENCE_SECONDS = 0.5
"""Seconds for survivors to notice a lost replica by themselves, before what they wait in is broken off."""


class Generation:
    """Its group is changed by the training thread alone, at step boundaries."""

    def __init__(self) -> None:
        self.number = 0
        self.members: tuple[str, ...] = ()
        """Members by rank; empty where no scheduler named them."""
        self.group: ReplicaGroup = lone_group()
        self.joined = False
        """True once this replica trains with the others, or alone in a process of its own."""
        self.joining = False
        """True for a replica that comes, or came, to a trial that was training."""
        self.dry_steps_left = 0
        self.broken: str | None = None
        """Why the present step does not count, once a replica is lost."""
        self.prepared: Prepared | None = None
        """The next generation, as it was prepared when the present step's round was put together."""
        self.took_over = False
        """This process has become the one that reports while the trial trained; whoever cares clears it."""
        self._last_rank = 0
        self._lost: Sequence[str] = ()
        """Members of this generation and the next one that the scheduler says are gone."""
        self._meeting: Prepared | None = None

    # ------------------------------------------------------------------ what follows from it

    @property
    def stands_alone(self) -> bool:
        """Tell whether there is nobody to do collectives with so far."""
        return not self.joined or self.group.world_size == 1

    @property
    def is_outside(self) -> bool:
        """Tell whether this replica comes to a trial that trains, and has not been let in."""
        return self.joining and not self.joined

    # ------------------------------------------------------------------ what changes it

    def come_to_train(self) -> None:
        """Come as a joiner to a trial that trains; it builds what the others have before it is let in."""
        self.joining = True
        self.dry_steps_left = DRY_STEPS

    def come_to_begin(self) -> None:
        """Come as one of the first: nobody trains, or this process has its trial's state already."""
        self.joining = False

    def begin_dry_pass(self) -> None:
        """Begin a pass of a joiner on its own."""
        self.dry_steps_left -= 1

    def end_dry_pass(self, *, built: bool) -> None:
        """End a dry pass; one that built no buckets (``built`` is False) is made once more."""
        self.dry_steps_left += not built

    def set_dry_passes(self, number: int) -> None:
        """Have so many dry passes left."""
        self.dry_steps_left = number

    def note_taking_over(self, *, is_new: bool) -> None:
        """Note that this process is the one that reports; ``is_new``: and does not know all that was reported."""
        self.took_over = is_new

    def prepare(self, prepared: Prepared | None) -> None:
        self.prepared = prepared

    def enter(self, prepared: Prepared) -> None:
        assert prepared.group is not None
        self.took_over |= self._last_rank > 0 and prepared.group.rank == 0
        self._last_rank = prepared.group.rank
        self.group.leave()
        self.group = prepared.group
        self.members = prepared.generation.members
        self.number = prepared.generation.number
        self.joined = True
        self.broken = None
        try:
            self.group.connect()
        except PeerLost as error:
            self.mark_broken(str(error))

    def enter_without_scheduler(self, group: ReplicaGroup | None) -> None:
        """Enter with the processes that were started with this one; None for a process that is alone."""
        self.group = group or self.group
        self.joined = True

    def drop(self, needs: GroupNeeds) -> None:
        """Close this replica's connections: others that still wait for it in a collective learn of the loss by that."""
        self.group.break_off()
        self.group = lone_group(needs)
        self.prepared = None

    def begin_anew(self) -> None:
        """Forget the group: a joiner's code is about to run again from its top, for a later epoch."""
        self.joined = False
        self.group = lone_group()
        self.broken = None

    def mark_broken(self, reason: str) -> None:
        """Note that a collective failed: this step does not count. Safe from any thread."""
        if self.broken is None:
            self.broken = reason

    # ------------------------------------------------------------------ replicas that are lost

    def note_losses(self, lost: Sequence[str]) -> None:
        """Note losses that the scheduler may know of before a collective does. Called from another thread."""
        self._lost = lost
        self._break_off_if_lost(self.members, self.group)
        meeting = self._meeting
        if meeting is not None and meeting.group is not None:
            self._break_off_if_lost(meeting.generation.members, meeting.group)

    @contextmanager
    def meeting(self, prepared: Prepared) -> Iterator[ReplicaGroup]:
        """While the members of a generation hand over state before they enter it: the loss of one ends that, too."""
        assert prepared.group is not None
        self._meeting = prepared
        self._break_off_if_lost(prepared.generation.members, prepared.group)
        try:
            yield prepared.group
        finally:
            self._meeting = None

    def _break_off_if_lost(self, members: Sequence[str], group: ReplicaGroup) -> None:
        if set(self._lost).isdisjoint(members):
            return

        def break_off() -> None:
            time.sleep(LOSS_PATIENCE_SECONDS)
            meeting = self._meeting
            if self.group is group or (meeting is not None and meeting.group is group):
                group.break_off()

        threading.Thread(target=break_off, name="elastune-loss", daemon=True).start()

    def succeeded_everywhere(self, succeeded: bool) -> bool:
        """Tell whether something succeeded on every replica; collective."""
        try:
            [votes] = self.group.sum_of(float(succeeded), what="votes")
        except PeerLost as error:
            self.mark_broken(str(error))
            return False
        return round(votes) == self.group.world_size
