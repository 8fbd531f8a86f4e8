"""StepRecord: what a replica has done since the last step that counted; where survivors of a loss stand."""

from __future__ import annotations

from dataclasses import dataclass

from dist_core.life import Listener


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    steps: int
    updates: int
    epoch: int
    meetings: int
    has_evaluated: bool
    """The code has to run again from behind the epoch's last training loop."""

    @property
    def come_so_far(self) -> tuple[int, int]:
        return self.steps, self.updates

    def can_go_on_from(self, furthest: Standing) -> bool:
        """Tell whether this replica reaches the furthest one's position by finishing its step."""
        behind = self.steps < furthest.steps
        return self.epoch == furthest.epoch and (
            furthest.meetings == 0 if behind else self.meetings == furthest.meetings
        )


class StepRecord(Listener):
    def __init__(self) -> None:
        self._updates = self._updates_before = 0
        """Updates of the present step, by optimizers and schedules; and those it had before a replica was lost in it,
        which count."""
        self.updates_of_last = 0
        """Updates of the step before the present one, in this generation."""
        self.meetings = 0
        """Meetings of all replicas since the last step."""

    @property
    def updates(self) -> int:
        """Updates of the present step that this replica has made."""
        return max(self._updates, self._updates_before)

    def counts_update(self) -> bool:
        """Tell whether the update that an optimizer or schedule is about to make has not been made yet.

        A replica may be lost between two of them in one step. Then the body runs again, and the updates that were made
        on all survivors are not made a second time.
        """
        self._updates += 1
        return self._updates > self._updates_before

    @property
    def has_made_next_update(self) -> bool:
        return self._updates < self._updates_before

    def note_meeting(self) -> None:
        self.meetings += 1

    def step_counts(self) -> None:
        self.updates_of_last = self.updates
        self._updates = self._updates_before = self.meetings = 0

    def step_is_left(self) -> None:
        """Leave a step at a batch that was only looked at: schedules that moved on beside it belong to no step."""
        self._updates = self._updates_before = 0

    def entered(self, rank: int, number: int) -> None:
        self.updates_of_last = 0

    def epoch_ended(self) -> None:
        self.meetings = 0

    def go_on_from(self, furthest: Standing) -> None:
        """Note how many updates the furthest survivor had made: the body of the step runs again."""
        self._updates_before, self._updates = furthest.updates, 0
